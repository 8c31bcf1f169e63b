"""Output of a run for people: progress, summary, what follows a run."""
