"""Rewards: each response is judged the moment it ends, by all verifiers that its task names."""
