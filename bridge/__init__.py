"""Contract between learner and actor: wire types, the store, and weight snapshots."""
