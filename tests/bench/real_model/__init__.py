"""A real model through the whole system, bounded by minutes of training; see `__main__`."""
