"""Console output of a run: progress, summary, and final report."""
