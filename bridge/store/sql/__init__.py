"""The store in SQL: one set of statements for every database."""
