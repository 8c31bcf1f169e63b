"""The rows of the environments that are shipped: their questions, and what an actor needs to play them.

Pure functions, light enough for every process: the learner makes prompts of them, an actor's environments read them.
"""
