"""Commands that a run does not need."""
