"""Processes that a command starts: they end with it, are watched, and hang for no longer than a bound."""
