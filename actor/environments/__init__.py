"""Multi-turn environments, played in separate processes; token in, token out."""
