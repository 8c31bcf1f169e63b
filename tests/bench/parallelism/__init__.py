"""The bench of the parallelism planner."""
