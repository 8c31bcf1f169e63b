"""`python -m launch.tools.plan`: simulates a run in virtual time, and searches splits of the hardware."""
