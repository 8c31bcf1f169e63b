"""Low-rank adapters: their shapes and start, how they are merged and written, and the base that they belong to."""
