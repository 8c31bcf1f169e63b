"""Environment-level asynchrony and redundant environments, measured and predicted."""
