"""Built-in environments; `configs.tasks` builds their rows."""
