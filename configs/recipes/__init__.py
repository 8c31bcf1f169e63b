"""Recipes: complete runs of real models, one file per run."""
