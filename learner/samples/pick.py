"""Which groups of an update are kept as text. Pure."""

import dataclasses

import numpy as np
from jaxtyping import Float32

from bridge.types import Group, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picked:
    """A trained group that is kept."""

    group: Group
    task: Task
    source: str
    """Name of its problem's source in `prompts.mixture`; empty where there is one."""
    advantages: list[Float32[np.ndarray, " T"]]
    """Of each token of each response, as they train."""


class SamplePick:
    """The groups of the update being filled that are kept; a dropped update takes them along."""

    def __init__(self, *, groups_per_round: int, kept_per_round: int) -> None:
        """Nothing is booked."""
        self._per_round, self._kept = groups_per_round, min(kept_per_round, groups_per_round)
        self.clear()

    def clear(self) -> None:
        """Forgets what is booked."""
        self._picked: list[Picked] = []

    def wants(self, index: int) -> bool:
        """Whether the group trained as number `index` of its round, from 0, is kept.

        They lie evenly in the order of training: late groups are long ones, so the first few would not do.
        """
        return (index + 1) * self._kept // self._per_round > index * self._kept // self._per_round

    def book(self, picked: Picked) -> None:
        """Keeps a group of the update being filled."""
        self._picked.append(picked)

    def take(self) -> list[Picked]:
        """What is booked; forgets it."""
        picked = self._picked
        self.clear()
        return picked
