"""Simulation of a run in virtual time."""
