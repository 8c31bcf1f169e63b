"""Model families: one small file of differences each."""
