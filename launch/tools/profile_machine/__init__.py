"""`python -m launch.tools.profile_machine`: measures this machine for the planner."""
