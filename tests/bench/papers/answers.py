"""What the papers state, by experiment and quantity: committed after the inputs and the predictions."""

from collections.abc import Mapping, Sequence

from tests.bench.papers.experiment import Published

ANSWERS: Mapping[str, Mapping[str, Published]] = {}
NOT_COMPARED: Mapping[str, str] = {}
"""Figures without a number in the text, and what the planner does not model."""
WRONG: Sequence[str] = ()
"""What the planner gets wrong, for the page."""
