"""Evaluation of a model folder, or a run's checkpoint, on vLLM: `python -m launch.tools.evaluate`."""
