"""What a store is asked for and answers, besides the wire types, and its errors."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from bridge.rollout_types import Group, Version

Topic = Literal["groups", "tickets", "claims", "weights", "run"]
"""What a process may wait for: complete groups; tickets offered, withdrawn or taken over; training tickets claimed;
announced weights; that the run is finished."""
TOPICS: tuple[Topic, ...] = get_args(Topic)

Mark = Mapping[Topic, int]
"""How often each topic had changed, as far as this process had heard, at one moment (`SharedStore.mark`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group and its place in the order of arrival."""

    seq: int
    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """That a run's learner has done all its steps; one that only died says nothing."""

    version: Version
    """Of the last weights."""
    time_s: float
    """When, by the store's clock."""


MAX_TASK_KEY_BYTES = 64
MAX_CASES = 2**12
"""Test cases of one task that have anchors; also in `postgres/schema.sql`, as are the bytes of a key."""
MAX_CASE_S = 99_999.999
"""Of an anchor: eight digits of milliseconds, more than a day."""
LIVE_S = 10.0
"""An actor that has said nothing for so long counts for no engine: five of its heartbeats."""
COUNTED_S = 1.0
"""For so long what was counted of the engines is taken as it is."""
NAME_LEASE_S = 10.0
"""For so long after its last heartbeat an actor keeps its name."""

PERMANENT = "for good: "
"""What the reason of a fence begins with that no probe will lift any more: its actor ends."""


class StoreLostError(TimeoutError):
    """The store could not be reached for longer than it was told to try."""


class LearnerLivesError(ValueError):
    """Another learner leads the run, and its lease has not ended."""


class StoreWentBackError(StoreLostError):
    """The store is a copy from before this learner began to lead: it must start again, from its checkpoint."""


class SupersededLearnerError(RuntimeError):
    """Another learner leads the run now: this one is of an older incarnation, and must end."""

    @classmethod
    def of(cls, incarnation: int, leading: object) -> "SupersededLearnerError | StoreWentBackError":
        """The error of a learner of `incarnation`, when `leading` is the one that leads."""
        if int(f"{leading}") < incarnation:
            return StoreWentBackError(
                f"the store went back: it knows incarnation {leading} of the learner, this one is {incarnation}; start "
                "again to go on from the last checkpoint (docs/store_care.md)"
            )
        return cls(f"another learner leads this run now: its incarnation is {leading}, this one's {incarnation}")


class UnfitGroupError(ValueError):
    """A group does not answer the ticket that has its id: another prompt may have taken the place of the one it had."""


class NameTakenError(ValueError):
    """Another actor, elsewhere, has this name."""

    def __init__(self, name: str, location: str, *, beat_s: float) -> None:
        """`beat_s` is the time of its last heartbeat, by the store's clock."""
        super().__init__(f"a live actor of this run has the name {name}, at {location}; give another --name")
        self.beat_s = beat_s


class FencedError(RuntimeError):
    """This actor may not serve: what it generated did not match the learner's weights."""
