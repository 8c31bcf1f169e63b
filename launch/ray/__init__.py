"""Ray backend: Ray places the processes; the run's data still goes through the store and the snapshots."""
