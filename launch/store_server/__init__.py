"""A PostgreSQL for a trial of several machines: `python -m launch.store_server`."""
