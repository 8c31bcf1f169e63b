"""`python -m launch.tools.profile_machine`: measures this machine for the planner.

`cli` starts one `profile_worker` for the engine and one for the learner. `measure_engine`, `measure_learner` and
`measure_store` measure.
"""
