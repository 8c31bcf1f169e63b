"""Server processes of a run."""
