"""Ticket planning, group filtering and round accounting; independent of the model."""
