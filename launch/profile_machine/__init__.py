"""`python -m launch.profile_machine`: measures this machine for the planner."""
