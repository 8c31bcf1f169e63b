"""Preparation of a run between the command line and the first process."""
