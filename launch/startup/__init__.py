"""Parts of a run that are built between the command line and the first process."""
