"""From an announced snapshot to weights in service."""
