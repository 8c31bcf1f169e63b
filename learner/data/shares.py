"""Weights to whole shares."""

from collections.abc import Mapping

SCALE = 10**12
"""Parts that a share is counted in."""


def in_parts(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` in proportion to the weights, by the largest remainders; the sum is exact, and what weighs 0 gets 0.

    Raises:
      ValueError: all weights are 0.
    """
    whole = sum(weights.values())
    if whole <= 0:
        raise ValueError(f"want a weight above 0, got {dict(weights)}")
    exact = {name: total * (weight / whole) for name, weight in weights.items()}
    parts = {name: int(part) for name, part in exact.items()}
    # Rounding may have given one part too many or too few of a large total; those of the largest remainders settle it.
    by_remainder = sorted((n for n, w in weights.items() if w > 0), key=lambda name: (parts[name] - exact[name], name))
    for i in range(abs(missing := total - sum(parts.values()))):
        parts[by_remainder[i % len(by_remainder)]] += 1 if missing > 0 else -1
    return parts
