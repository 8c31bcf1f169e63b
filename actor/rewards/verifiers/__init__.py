"""Verifiers by module: `score(response, task, context)`."""
