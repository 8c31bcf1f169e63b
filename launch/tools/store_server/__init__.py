"""Command `store-server`: a PostgreSQL server, its roles and its certificates for a trial."""
