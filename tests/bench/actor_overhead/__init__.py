"""What the actor costs beside the engine that it serves with."""
