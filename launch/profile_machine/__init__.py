"""`python -m launch.profile_machine`: measures this machine for the planner.

`command` starts a `worker` for each side and asks; `engine` and `learner` measure.
"""
