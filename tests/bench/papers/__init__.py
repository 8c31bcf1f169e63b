"""Planner predictions of published experiments, compared with the papers' numbers."""
