"""Topics, results, limits and errors of the store."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from bridge.rollout_types import Group, Version

Topic = Literal["groups", "tickets", "claims", "weights", "run"]
"""Change that a process can wait for. `groups`: complete groups. `tickets`: tickets offered, withdrawn or taken over.
`claims`: training tickets claimed. `weights`: announced weights. `run`: the run finished."""
TOPICS: tuple[Topic, ...] = get_args(Topic)

Mark = Mapping[Topic, int]
"""Number of changes of each topic that this process had seen at one moment (`SharedStore.mark`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredGroup:
    """Group and its sequence number in order of arrival."""

    seq: int
    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """End of a run whose learner has done all its steps. A learner that only crashed does not set it."""

    version: Version
    """Version of the last weights."""
    time_s: float
    """Unix time by the store's clock."""


MAX_TASK_KEY_BYTES = 64
MAX_CASES = 2**12
"""Most test cases of one task that have anchors. This limit and MAX_TASK_KEY_BYTES are also in
`postgres/schema.sql`."""
MAX_CASE_S = 99_999.999
"""Largest anchor, in seconds: eight digits of milliseconds, more than a day."""
LIVE_S = 10.0
"""Seconds without a heartbeat after which an actor's engine no longer counts; five heartbeat intervals."""
COUNTED_S = 1.0
"""Seconds for which a count of the engines stays valid."""
NAME_LEASE_S = 10.0
"""Seconds after its last heartbeat for which an actor keeps its name."""

PERMANENT = "for good: "
"""Prefix of a fence reason that no probe lifts; the fenced actor exits."""


class StoreLostError(TimeoutError):
    """Error for a store that was unreachable for longer than its retry time."""


class LearnerLivesError(ValueError):
    """Error for a run that another learner leads with an unexpired lease."""


class StoreWentBackError(StoreLostError):
    """Error for a store that is older than this learner's leadership; the learner must restart from its checkpoint."""


class SupersededLearnerError(RuntimeError):
    """Error for a learner of an older incarnation than the run's leader; the learner must exit."""

    @classmethod
    def of(cls, incarnation: int, leading: object) -> "SupersededLearnerError | StoreWentBackError":
        """Returns the error for a learner of `incarnation` in a run led by the incarnation `leading`."""
        if int(f"{leading}") < incarnation:
            return StoreWentBackError(
                f"the store went back: it knows incarnation {leading} of the learner, this one is {incarnation}; start "
                "again to go on from the last checkpoint (docs/production.md)"
            )
        return cls(f"another learner leads this run now: its incarnation is {leading}, this one's {incarnation}")


class UnfitGroupError(ValueError):
    """Error for a group that does not match the ticket with its id, for example because the prompt was replaced."""


class NameTakenError(ValueError):
    """Error for an actor whose name belongs to a live actor at another location."""

    def __init__(self, name: str, location: str, *, beat_s: float) -> None:
        """Makes the error for the actor at `location`, whose last heartbeat was at `beat_s` by the store's clock."""
        super().__init__(f"a live actor of this run has the name {name}, at {location}; give another --name")
        self.beat_s = beat_s


class FencedError(RuntimeError):
    """Error for a fenced actor: its generated tokens did not match the learner's weights."""
