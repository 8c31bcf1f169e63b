"""Many simulated engines, each with a real actor, under one real learner: what the schedules gain on such a fleet."""
