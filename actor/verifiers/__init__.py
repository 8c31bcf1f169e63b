"""Judges of responses: `score(response_text, task, finish) -> float`, one module each, found by name.

They run in worker processes of their own (`worker.py`), which `pool.py` kills when they hang.
"""
