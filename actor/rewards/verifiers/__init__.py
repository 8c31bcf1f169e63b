"""Judges of responses: `score(response, task, context)`, one module each, found by name.

They run in worker processes of their own (`../verifier_worker.py`), which `../verifier_pool.py` kills when they hang.
"""
