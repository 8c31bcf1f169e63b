"""Adapters against full training at the same samples: reward, bytes of a publish, memory; see `__main__`."""
