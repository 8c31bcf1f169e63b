"""The event log of a run, for its report: what each process did in a round, and what went wrong."""
