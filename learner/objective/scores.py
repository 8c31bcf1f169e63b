"""What verifiers and environments gave responses, as means: for the rows of updates and of evaluations."""

import collections
from collections.abc import Iterable

import numpy as np

from bridge.rollout_types import RewardScore, Rollout


def mean_scores(scores: Iterable[RewardScore]) -> dict[str, float]:
    """By verifier: the mean of its scores, before they are weighted."""
    values: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for score in scores:
        values[score.name].append(score.value)
    return {name: float(np.mean(of_verifier)) for name, of_verifier in sorted(values.items())}


def is_episode(rollout: Rollout) -> bool:
    """Whether an environment rewarded it turn by turn, be it with nothing."""
    return rollout.turn_rewards.size > 0
