"""Metrics: the record metrics.jsonl, its trackers (one module each), and the feed that sends the record to them."""
