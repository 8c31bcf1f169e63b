"""Whole runs of real models, each one file: a model, its problems, and the numbers that train it."""
