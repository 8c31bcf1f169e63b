"""Judges of responses: `score(response, task, context)`, one module each, found by name.

They run in worker processes of their own (`worker.py`), which `pool.py` kills when they hang.
"""
