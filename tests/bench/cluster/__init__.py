"""`python -m tests.bench.cluster`: the planner's store and network against what was measured, and its figure."""
