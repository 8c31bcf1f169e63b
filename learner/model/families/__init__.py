"""Model families: one small module of differences each."""
