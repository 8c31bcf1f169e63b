"""Capacity model of a run's control plane in closed form: the first bottleneck of learner, engines, store and links.

`loads` computes the calls and bytes of a run and their share of store and links, and `transfers` the time and bytes of
a version. `capacity` finds the first bottleneck, and simulates the store's queue for
`launch/tools/plan/sim/simulate.py`.
"""
