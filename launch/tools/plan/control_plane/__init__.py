"""Which part of a run gives out first: learner, engines, store, links. Loads and capacities in closed form, no events.

`profile` is what store and network can do; `workload`, `control_calls` and `transfers` say what a run asks of them,
`store_parts` and `weight_parts` hold the one against the other, `limits` finds the first to give out, `scale` over many
sizes of cluster. `line` is the store in virtual time, for `launch/tools/plan/sim/simulate.py`; `report` and `figure`
show it all.
"""
