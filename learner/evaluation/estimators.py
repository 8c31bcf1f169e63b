"""Estimators over k samples per problem: avg@k, pass@k, maj@k, each with its standard error.

Problems are independent and samples of one problem are not, so errors are clustered by problem (Miller 2024, "Adding
Error Bars to Evals", arXiv 2411.00640, section 2.2). With k samples of each problem, that is the standard error of the
mean of the per-problem estimates.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean over problems."""

    value: float
    stderr: float
    """Standard error of the mean, clustered by problem, in the mean's unit; NaN for a single problem."""


def over_problems(values: Float64[np.ndarray, " N"]) -> Estimate:
    """Returns the mean over N >= 1 problems and its standard error, s / sqrt(N) with s over N - 1."""
    if not values.size:
        raise ValueError("an estimate needs at least one problem")
    stderr = float(values.std(ddof=1)) / math.sqrt(values.size) if values.size > 1 else math.nan
    return Estimate(float(values.mean()), stderr)


def avg_at_k(rewards: Float64[np.ndarray, "N k"]) -> Estimate:
    """Returns avg@k, the mean reward."""
    return over_problems(rewards.mean(axis=1))


def pass_at(num_samples: int, num_passed: int, j: int) -> float:
    """Returns the unbiased probability that at least one of j samples passes, from n samples of which c passed.

    1 - C(n - c, j) / C(n, j) (Chen et al. 2021, arXiv 2107.03374, equation 1), as a product. Raises ValueError
    unless 1 <= j <= n and 0 <= c <= n.
    """
    if not 1 <= j <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"expected 1 <= j <= n and 0 <= c <= n, got j={j} n={num_samples} c={num_passed}")
    if num_samples - num_passed < j:
        return 1.0
    left = np.arange(num_samples - num_passed + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - j / left))


def pass_at_j(passed: Bool[np.ndarray, "N k"], j: int) -> Estimate:
    """Returns pass@j for 1 <= j <= k, else raises ValueError; pass@1 is the fraction of samples that pass."""
    k = passed.shape[1]
    return over_problems(np.array([pass_at(k, int(c), j) for c in passed.sum(axis=1)], np.float64))


def majority(answers: Sequence[str], passed: Sequence[bool]) -> float:
    """Returns 1 if the most frequent answer of a problem's samples passes, else 0 (self-consistency, Wang et al. 2022).

    Samples without an answer (empty) do not vote, and a problem without votes scores 0. A tie scores the mean over the
    tied answers. If only some samples of an answer pass, for example because responses end differently, the answer
    scores that fraction.
    """
    votes: dict[str, list[bool]] = {}
    for answer, has_passed in zip(answers, passed, strict=True):
        if answer:
            votes.setdefault(answer, []).append(bool(has_passed))
    most = max(map(len, votes.values()), default=0)
    winners = [of_answer for of_answer in votes.values() if len(of_answer) == most]
    return sum(sum(w) / most for w in winners) / len(winners) if winners else 0.0


def maj_at_k(answers: Sequence[Sequence[str]], passed: Bool[np.ndarray, "N k"]) -> Estimate:
    """Returns maj@k, the mean of `majority`."""
    values = [majority(a, p.tolist()) for a, p in zip(answers, passed, strict=True)]
    return over_problems(np.array(values, np.float64))


def sizes_of_pass(k: int) -> list[int]:
    """Returns the j for which pass@j is reported: powers of two, and k."""
    return sorted({*(1 << i for i in range(k.bit_length()) if 1 << i <= k), k})
