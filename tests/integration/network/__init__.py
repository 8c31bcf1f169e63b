"""Runs across machines, on one: namespaces as machines, links that can be slow and cut, and what happens then."""
