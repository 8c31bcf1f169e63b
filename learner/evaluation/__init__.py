"""Evaluation: problem sets, estimators with standard errors, and what is kept of each. No jax in here."""
