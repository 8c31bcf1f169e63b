"""Processes of a run with real vLLM engines that are killed at a given point of an update, or served wrong weights.

All else is the real command's own; what their engines sampled is held against transformers afterwards.
"""
