"""`launch.tools.evaluate` against a plain loop of transformers; see `__main__`."""
