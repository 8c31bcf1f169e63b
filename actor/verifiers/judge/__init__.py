"""A language model as verifier: what it is asked, how it is asked over HTTP, and how its answer is read."""

from actor.verifiers.judge.client import Judge, read_template

__all__ = ["Judge", "read_template"]
