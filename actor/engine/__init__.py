"""What the actor asks of an engine, and what an engine's size follows."""
