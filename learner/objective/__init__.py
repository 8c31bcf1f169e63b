"""Losses, KL estimators and advantages: pure functions."""
