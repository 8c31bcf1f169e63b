"""Samples as text: which groups are kept, what a line of samples.jsonl says, and the file."""
