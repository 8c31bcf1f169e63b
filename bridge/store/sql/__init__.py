"""SQL of the store: one set of statements for every database engine."""
