"""Processes of a run with vLLM engines on machines of their own, one of which may serve wrong weights."""
