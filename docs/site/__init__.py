"""Documentation site: MkDocs hooks and generated pages."""
