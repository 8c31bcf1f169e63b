"""Supervision of child processes: they exit with their parent, and hangs are detected within a bound."""
