"""Server processes beside a run."""
