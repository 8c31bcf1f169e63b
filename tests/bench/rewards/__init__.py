"""The bench of the reward scheduler: synchronous, asynchronous, and with adaptive timeouts."""
