"""PostgreSQL engine of the store: connections, roles, tables."""
