"""Rewards: each response is scored as soon as it finishes, by all verifiers of its task."""
