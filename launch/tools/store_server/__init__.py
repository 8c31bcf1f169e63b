"""Command `store-server`: a PostgreSQL server with roles and certificates for a trial."""
