"""Weights on their way out, and the proof of what is served."""
