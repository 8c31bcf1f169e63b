"""The report's page: its template, its style, its script, and how data of others gets into it unharmed."""
