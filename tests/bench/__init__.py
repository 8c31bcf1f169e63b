"""Benchmarks; they measure and never assert on time."""
