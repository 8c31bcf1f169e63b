"""`python -m launch.plan`: a run in virtual time."""
