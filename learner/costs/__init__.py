"""What a step costs: model FLOPs, and what XLA compiled."""
