"""Tests of a real engine, without a job around it; those of one engine share it."""
