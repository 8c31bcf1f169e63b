"""Weight delivery: from an announced snapshot to served weights."""
