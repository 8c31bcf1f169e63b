"""`python -m launch.tools.profile_machine`: measures this machine for the planner.

`command` starts a `worker` for each side and asks; `engine` and `learner` measure.
"""
