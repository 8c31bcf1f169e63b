"""The simulation of a run in virtual time."""
