"""Fewer points, rounds and samples than there are, and how many were left out. Pure; numpy in float64."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int

MAX_POINTS = 600
"""Of a curve: more than a figure is wide on most screens."""


def bins(num_rows: int, max_points: int = MAX_POINTS) -> Int[np.ndarray, " B"]:
    """Where the bins begin that `num_rows` rows are put into: all of one size, but the last."""
    size = -(-num_rows // max_points) if num_rows else 1
    return np.arange(0, num_rows, size)


def binned(
    values: Float64[np.ndarray, " N"], starts: Int[np.ndarray, " B"], *, largest: bool = False
) -> Float64[np.ndarray, " B"]:
    """Each bin's mean, or its largest value; without NaN, unless it has nothing else."""
    if starts.size == values.size:
        return values
    is_known = np.isfinite(values)
    num_known = np.add.reduceat(is_known.astype(np.float64), starts)
    if largest:
        found = np.maximum.reduceat(np.where(is_known, values, -np.inf), starts)
        return np.where(num_known > 0, found, np.nan)
    sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
    return np.where(num_known > 0, sums / np.maximum(num_known, 1), np.nan)


def running_mean(
    values: Float64[np.ndarray, " N"], width: int
) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """Mean of `width` neighbours around each value, and its standard error: their spread over sqrt(n).

    The spread is between updates, so it holds the groups' as well as the responses' share, and the trend within the
    width. Fewer neighbours at the ends; the error is NaN of fewer than three values.
    """
    is_known = np.isfinite(values)
    known = np.where(is_known, values, 0.0)
    shift = known.sum() / max(1, is_known.sum())  # sums of squares of large values would lose their spread
    centred = np.where(is_known, values - shift, 0.0)
    index = np.arange(values.size)
    low = np.maximum(0, index - width // 2)
    high = np.minimum(values.size, index + (width + 1) // 2)

    def windowed(of: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        total = np.concatenate([[0.0], np.cumsum(of)])
        return total[high] - total[low]

    num = windowed(is_known.astype(np.float64))
    mean = windowed(centred) / np.maximum(num, 1)
    variance = np.maximum(windowed(centred**2) / np.maximum(num, 1) - mean**2, 0.0) * num / np.maximum(num - 1, 1)
    error = np.where(num >= 3, np.sqrt(variance / np.maximum(num, 1)), np.nan)
    return np.where(num > 0, mean + shift, np.nan), error


def spread_out(sizes: Sequence[int], *, budget: int) -> list[int]:
    """Indices of things of these sizes that fit `budget` together: evenly spread, the first and the last among them."""
    num = len(sizes)
    if sum(sizes) <= budget:
        return list(range(num))
    low, high = 0, num
    while low < high:  # the most that fit
        middle = (low + high + 1) // 2
        if sum(sizes[i] for i in _evenly(num, middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return _evenly(num, low)


def _evenly(num: int, wanted: int) -> list[int]:
    if wanted <= 1:
        return [num - 1][:wanted]
    return sorted(set(np.linspace(0, num - 1, wanted).round().astype(int).tolist()))
