"""Mean scores of verifiers, and detection of episodes, for update and evaluation rows."""

import collections
from collections.abc import Iterable

import numpy as np

from bridge.rollout_types import RewardScore, Rollout


def mean_scores(scores: Iterable[RewardScore]) -> dict[str, float]:
    """Returns the mean score by verifier, before weighting."""
    values: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for score in scores:
        values[score.name].append(score.value)
    return {name: float(np.mean(of_verifier)) for name, of_verifier in sorted(values.items())}


def is_episode(rollout: Rollout) -> bool:
    """Returns True if an environment rewarded the response per turn, even with 0."""
    return rollout.turn_rewards.size > 0
