"""Where problems come from: rows of files and data sets, by number, and what is made by index."""
