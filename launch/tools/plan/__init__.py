"""`python -m launch.tools.plan`: a run in virtual time, and a search over splits of the hardware.

`simulate` joins the parts: `rollout` (engines, simulated by `sim_engine` from an `engine_profile`), `learner` with its
`chips`, the `pool` of tickets and the `calendar` that is their clock; `profiles` and `lengths` are the input, `outcome`
and `report` what comes out, `search` tries many.
"""
