"""Frozen, validated configuration and one file per preset."""
