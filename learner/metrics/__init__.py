"""Where a run's metrics are shown besides its own record: one file a tracker, and the feed that follows the record."""
