"""A published experiment as the planner sees it, and its error against what the paper states."""

import dataclasses
from collections.abc import Callable, Mapping

Published = float | tuple[float, float]
"""A number of a paper, or the bounds of a range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """Inputs are the function's module's; the paper's numbers are in `answers.py`, by the same names."""

    paper: str
    where: str
    """Table, figure or section."""
    predict: Callable[[], Mapping[str, float]]
    """Returns the planner's numbers by quantity."""
    blind: bool
    """True if none of the paper's numbers of this experiment was read before the inputs were committed."""
    in_sight: bool = False
    """True if inputs were chosen with the paper's numbers in sight: it proves nothing, and counts in no aim."""
    left_open: str = ""
    """Missing inputs, and what was assumed."""

    @property
    def name(self) -> str:
        return f"{self.paper}, {self.where}"


def error(predicted: float, published: Published) -> float:
    """Returns |predicted / paper - 1|; of a range, against its nearest bound, and 0 inside."""
    low, high = published if isinstance(published, tuple) else (published, published)
    nearest = min(max(predicted, low), high)
    return abs(predicted - nearest) / abs(nearest)
