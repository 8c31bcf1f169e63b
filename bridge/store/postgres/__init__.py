"""The store on a PostgreSQL server: connections, roles, tables."""
