"""Held-out reward of tasks of several turns, with a tool, and of programs; see `__main__`."""
