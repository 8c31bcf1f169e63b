"""Evaluation: problem sets, estimators with standard errors, and results. Imports no jax."""
