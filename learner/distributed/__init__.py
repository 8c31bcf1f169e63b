"""Learner processes, one per host: identity, communication and sharding."""
