"""Exact mixing proportions, and source weights of the curriculum.

`grain.MapDataset.mix` rounds weights to integers of which the smallest is 100 (3 : 7 becomes 100 : 233), and its
weights are fixed. Here, after any n picks, a source with share p has more than p n - 1 and less than p n + 1 of them.
The schedule picks the earliest deadline among periodic unit tasks (Pfair on one processor, Baruah et al. 1996). All
state is integers, so a restored mixture continues bit-exactly.
"""

import fractions
from collections.abc import Mapping
from typing import Any

from configs.sections import PromptsConfig


class Curriculum:
    """Running mean reward and current weight of each source (`prompts.curriculum`)."""

    def __init__(self, config: PromptsConfig) -> None:
        self._config = config
        self._weights = {name: source.weight for name, source in config.sources.items()}
        self._stages = {name: source.stage for name, source in config.sources.items()}
        self._num_groups = dict.fromkeys(self._weights, 0)
        self._rewards = dict.fromkeys(self._weights, 0.0)
        self._stage = min(self._stages.values())

    @property
    def rewards(self) -> dict[str, float]:
        """Running mean reward of each source that has trained groups."""
        return {name: reward for name, reward in self._rewards.items() if self._num_groups[name]}

    def observe(self, name: str, reward: float) -> None:
        """Records the mean reward of a source's group; ignores sources that the config no longer has."""
        if name not in self._weights:
            return
        self._num_groups[name] += 1
        among = min(self._num_groups[name], self._config.curriculum_groups)
        self._rewards[name] += (reward - self._rewards[name]) / among
        if self._config.curriculum == "stages":
            self._end_stages()

    def weights(self) -> Mapping[str, float]:
        """Returns the current weight of each source."""
        if self._config.curriculum == "none":
            return self._weights
        factor = self._learnable if self._config.curriculum == "learnable" else self._staged
        return {name: weight * factor(name) for name, weight in self._weights.items()}

    def get_state(self) -> dict[str, Any]:
        """Returns the means and the stage as JSON values."""
        return {"num_groups": dict(self._num_groups), "rewards": dict(self._rewards), "stage": self._stage}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state of `get_state`; sources that it lacks start without a reward."""
        for name in self._weights:
            self._num_groups[name] = state["num_groups"].get(name, 0)
            self._rewards[name] = state["rewards"].get(name, 0.0)
        stages = sorted(set(self._stages.values()))
        self._stage = max((s for s in stages if s <= state["stage"]), default=stages[0])

    def _learnable(self, name: str) -> float:
        """Returns 4 r (1 - r), the normalized variance of a 0/1 reward; 1 before the first reward."""
        if not self._num_groups[name]:
            return 1.0
        reward = min(max(self._rewards[name], 0.0), 1.0)
        return max(4 * reward * (1 - reward), self._config.learnable_floor)

    def _staged(self, name: str) -> float:
        if self._stages[name] == self._stage:
            return 1.0
        return self._config.stage_review if self._stages[name] < self._stage else 0.0

    def _end_stages(self) -> None:
        """Advances to the next stage once all sources of this stage pass; never moves back."""
        later = [s for s in self._stages.values() if s > self._stage]
        if later and all(self._is_passed(n) for n, stage in self._stages.items() if stage == self._stage):
            self._stage = min(later)

    def _is_passed(self, name: str) -> bool:
        enough = self._num_groups[name] >= self._config.curriculum_groups
        return enough and self._rewards[name] >= self._config.stage_reward


SCALE = 10**12
"""Units that make up a whole share."""


def apportion(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Returns integers proportional to the weights that sum to `total`; raises ValueError if all weights are 0."""
    whole = sum(weights.values())
    if whole <= 0:
        raise ValueError(f"weights: at least one must be above 0, got {dict(weights)}")
    exact = {name: total * (weight / whole) for name, weight in weights.items()}
    parts = {name: int(part) for name, part in exact.items()}
    # Truncation and float rounding leave a few units missing or in excess; the largest remainders absorb them.
    by_remainder = sorted((n for n, w in weights.items() if w > 0), key=lambda name: (parts[name] - exact[name], name))
    for i in range(abs(missing := total - sum(parts.values()))):
        parts[by_remainder[i % len(by_remainder)]] += 1 if missing > 0 else -1
    return parts


class Mixture:
    """Scheduler that picks names in proportion to weights."""

    def __init__(self, names: list[str]) -> None:
        self._owed = dict.fromkeys(names, 0)
        """Entitled minus actual picks of each name, in units of 1 / `SCALE`; the sum is 0."""

    def pick(self, weights: Mapping[str, float]) -> str:
        """Returns the next name; never one with weight 0."""
        shares = apportion(weights, SCALE)
        for name, share in shares.items():
            self._owed[name] += share
        asked = [name for name, share in shares.items() if share > 0]
        # Only names with a positive balance are eligible. After a change of weights there may be none.
        owed = [name for name in asked if self._owed[name] > 0]
        picked = (
            min(owed, key=lambda name: (_picks_left(self._owed[name], shares[name]), -self._owed[name], name))
            if owed
            else max(asked, key=lambda name: (self._owed[name], name))
        )
        self._owed[picked] -= SCALE
        return picked

    def get_state(self) -> dict[str, Any]:
        """Returns the balances as JSON values."""
        return {"owed": dict(self._owed)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state of `get_state`; all balances start at 0 if the names differ."""
        owed = state["owed"]
        self._owed = {name: owed[name] if owed.keys() == self._owed.keys() else 0 for name in self._owed}


def _picks_left(owed: int, share: int) -> fractions.Fraction:
    """Returns the deadline of a name: picks of other names until it is owed a whole pick."""
    return fractions.Fraction(SCALE - owed, share)
