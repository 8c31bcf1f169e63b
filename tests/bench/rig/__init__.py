"""The bench rig: a real engine on one core and a real learner on another, shared by many short runs."""
