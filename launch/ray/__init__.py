"""A run on a Ray cluster: Ray places the processes, the run's data goes through the store and the snapshots as ever."""
