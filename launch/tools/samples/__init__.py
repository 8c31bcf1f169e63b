"""Command `samples`: prompts and responses of a run in the terminal."""
