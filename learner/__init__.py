"""The JAX learner: trains on complete groups as they arrive."""
