"""Verifiers by module: `score(response, task, context)`.

They run in worker processes (`../verifier_worker.py`), which `../verifier_pool.py` kills when they hang.
"""
