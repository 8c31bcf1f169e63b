"""Capacity model of a run's control plane in closed form: the first bottleneck of learner, engines, store and links."""
