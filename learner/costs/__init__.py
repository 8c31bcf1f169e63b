"""What a step costs: model FLOPs and memory."""
