"""Means and ratios with 95% confidence intervals (Student's t)."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student_t

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval; NaN bounds where one measurement gives no interval."""

    value: float
    low: float
    high: float

    def map(self, a: float, b: float) -> "Estimate":
        """Returns a + b x."""
        low, high = sorted((a + b * self.low, a + b * self.high))
        return Estimate(a + b * self.value, low, high)


def mean(numbers: Sequence[float]) -> Estimate:
    """Returns the mean. Raises ValueError if there are no numbers."""
    if not numbers:
        raise ValueError("an estimate requires at least one measurement")
    middle = statistics.fmean(numbers)
    if len(numbers) == 1:
        return Estimate(middle, math.nan, math.nan)
    half = float(student_t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1)) * statistics.stdev(numbers)
    half /= math.sqrt(len(numbers))
    return Estimate(middle, middle - half, middle + half)


def highest(numbers: Sequence[float], *, num_comparisons: int) -> float:
    """Returns the upper bound of a mean, so that all bounds of `num_comparisons` means hold together in 95% of cases.

    One-sided and with Bonferroni's correction; infinite for one number. Raises ValueError if there are no numbers.
    """
    if len(numbers) < 2:
        mean(numbers)
        return math.inf
    quantile = float(student_t.ppf(1 - (1 - CONFIDENCE) / num_comparisons, len(numbers) - 1))
    return statistics.fmean(numbers) + quantile * statistics.stdev(numbers) / math.sqrt(len(numbers))


def ratio(numbers: Sequence[float], others: Sequence[float]) -> Estimate:
    """Returns the geometric mean of the ratios of pairs, with the interval of the mean of their logarithms.

    Pairs of positive numbers are of the same turn (`sessions.run_in_turns`) or round. Raises ValueError if lengths
    differ, or there are no pairs.
    """
    found = mean([math.log(a / b) for a, b in zip(numbers, others, strict=True)])
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high))


def less_pct(numbers: Sequence[float], others: Sequence[float]) -> Estimate:
    """Returns the percentage by which `numbers` are below `others`, of pairs as in `ratio`."""
    return ratio(numbers, others).map(100.0, -100.0)
