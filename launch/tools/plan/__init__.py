"""`python -m launch.tools.plan`: simulates a run in virtual time, and searches splits of the hardware.

`sim` simulates engines, learner and tickets. `profile` and `workload` are its input, `plan_tables` prints its output,
`search` tries many splits, and `control_plane` computes loads of store and links.
"""
