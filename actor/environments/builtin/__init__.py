"""Environments that come with Sluice; how their rows are made is in `configs.tasks`."""
