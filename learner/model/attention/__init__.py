"""Attention over packed rows, one file an implementation."""
