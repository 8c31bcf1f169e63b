"""Snapshots from other machines: a version from any place that has it into a local file, verified chunk by chunk."""
