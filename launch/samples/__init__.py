"""Samples of a run, to read in a terminal: `python -m launch.samples`."""
