"""Meshes, compiler options and memory."""
