"""Exact mixing proportions and the curriculum's weights.

`grain.MapDataset.mix` rounds weights to whole numbers of which the smallest is 100 (3 : 7 becomes 100 : 233), and they
stand once it is made. Here a source with a share p of n problems has been asked for more than p n - 1 and less than
p n + 1, at every n: the schedule by earliest deadlines of periodic tasks that take a slot each (Pfair on one processor,
Baruah et al. 1996). All is whole numbers, so that a restored mixture goes on to the bit.
"""

import fractions
from collections.abc import Mapping
from typing import Any

from configs.sections import PromptsConfig


class Curriculum:
    """Keeps each source's running mean reward, and says what its weight is now (`prompts.curriculum`)."""

    def __init__(self, config: PromptsConfig) -> None:
        """No reward was seen yet: the weights are those of the config, or the first stage's."""
        self._config = config
        self._weights = {name: source.weight for name, source in config.sources.items()}
        self._stages = {name: source.stage for name, source in config.sources.items()}
        self._num_groups = dict.fromkeys(self._weights, 0)
        self._rewards = dict.fromkeys(self._weights, 0.0)
        self._stage = min(self._stages.values())

    @property
    def rewards(self) -> dict[str, float]:
        """Each source's running mean reward; of those that had groups."""
        return {name: reward for name, reward in self._rewards.items() if self._num_groups[name]}

    @property
    def stage(self) -> int:
        """The stage that is trained now."""
        return self._stage

    def observe(self, name: str, reward: float) -> None:
        """Takes in the mean reward of a source's group; forgets a source that is not in the config any more."""
        if name not in self._weights:
            return
        self._num_groups[name] += 1
        among = min(self._num_groups[name], self._config.curriculum_groups)
        self._rewards[name] += (reward - self._rewards[name]) / among
        if self._config.curriculum == "stages":
            self._end_stages()

    def weights(self) -> Mapping[str, float]:
        """What each source's weight is now."""
        factor = {"none": _always, "learnable": self._learnable, "stages": self._staged}[self._config.curriculum]
        return {name: weight * factor(name) for name, weight in self._weights.items()}

    def get_state(self) -> dict[str, Any]:
        """The means and the stage; JSON."""
        return {"num_groups": dict(self._num_groups), "rewards": dict(self._rewards), "stage": self._stage}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called; a source that was not there then begins without a reward."""
        for name in self._weights:
            self._num_groups[name] = state["num_groups"].get(name, 0)
            self._rewards[name] = state["rewards"].get(name, 0.0)
        stages = sorted(set(self._stages.values()))
        self._stage = max((s for s in stages if s <= state["stage"]), default=stages[0])

    def _learnable(self, name: str) -> float:
        """4 r (1 - r), the variance of a reward of 0 or 1 over its largest; 1 before there is a reward."""
        if not self._num_groups[name]:
            return 1.0
        reward = min(max(self._rewards[name], 0.0), 1.0)
        return max(4 * reward * (1 - reward), self._config.learnable_floor)

    def _staged(self, name: str) -> float:
        if self._stages[name] == self._stage:
            return 1.0
        return self._config.stage_review if self._stages[name] < self._stage else 0.0

    def _end_stages(self) -> None:
        """Goes on to the next stage once all sources of this one are good enough; never back."""
        later = [s for s in self._stages.values() if s > self._stage]
        if later and all(self._is_passed(n) for n, stage in self._stages.items() if stage == self._stage):
            self._stage = min(later)

    def _is_passed(self, name: str) -> bool:
        enough = self._num_groups[name] >= self._config.curriculum_groups
        return enough and self._rewards[name] >= self._config.stage_reward


def _always(name: str) -> float:
    del name
    return 1.0


SCALE = 10**12
"""Parts that a share is counted in."""


def apportion(weights: Mapping[str, float], total: int) -> dict[str, int]:
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


class Mixture:
    """Picks names in proportion to weights."""

    def __init__(self, names: list[str]) -> None:
        """Nobody was picked yet."""
        self._owed = dict.fromkeys(names, 0)
        """Picks that each name's share amounts to less those it had, in parts of `SCALE`; the sum is 0."""

    def pick(self, weights: Mapping[str, float]) -> str:
        """The next name; none whose weight is 0."""
        shares = apportion(weights, SCALE)
        for name, share in shares.items():
            self._owed[name] += share
        asked = [name for name, share in shares.items() if share > 0]
        # Only who is owed something may be picked; while weights change, it may be that none of these is.
        owed = [name for name in asked if self._owed[name] > 0]
        picked = (
            min(owed, key=lambda name: (_picks_left(self._owed[name], shares[name]), -self._owed[name], name))
            if owed
            else max(asked, key=lambda name: (self._owed[name], name))
        )
        self._owed[picked] -= SCALE
        return picked

    def get_state(self) -> dict[str, Any]:
        """What each name is owed; JSON."""
        return {"owed": dict(self._owed)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called; begins anew if the names are others."""
        owed = state["owed"]
        self._owed = {name: owed[name] if owed.keys() == self._owed.keys() else 0 for name in self._owed}


def _picks_left(owed: int, share: int) -> fractions.Fraction:
    """After how many more picks of others a name would be owed a whole one: its deadline."""
    return fractions.Fraction(SCALE - owed, share)
