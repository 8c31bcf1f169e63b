"""Serving engines of a run and the oldest weights that they serve, from the actors' heartbeats.

The learner issues tickets for these weights or later ones (`Ticket.min_version`). No actor then waits for newer
weights, and the learner knows the maximum age of a group that has not arrived. Weights only become newer within an
incarnation of the learner, so an old answer is a lower bound.
"""

import time
from collections.abc import Callable

from bridge.heartbeat_types import ActorReport
from bridge.store.sql.learner_side import LearnerStore
from bridge.store.store_types import LIVE_S

LOOK_S = 1.0
"""Interval between two reads of the heartbeats, in seconds."""


def serving_engines(store: LearnerStore, *, after_s: float = 0.0, needs_all: bool = True) -> list[ActorReport] | None:
    """Returns the reports of the engines that serve; None if none serves.

    A report before `after_s`, a time of the store's clock, counts as none. With `needs_all` the result is None while
    any engine has no report, as when it is starting.
    """
    since_s = store.now_s() - LIVE_S
    live = [b for b in store.heartbeats() if b.role == "actor" and b.time_s > since_s]
    reports = [b.report if b.time_s > after_s else None for b in live]
    serving = [r for r in reports if r is not None and not r.is_shutting_down]
    return None if needs_all and None in reports else serving or None


class ServedSteps:
    """Lower bound on the step of the weights on which a new request starts."""

    def __init__(
        self,
        store: LearnerStore,
        *,
        incarnation: int,
        is_needed: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates a bound that is 0 until an engine serves this learner's weights, and always 0 without `is_needed`.

        Engines with weights of an earlier incarnation load newer weights before they serve a request.
        """
        self._store, self._incarnation, self._is_needed, self._clock = store, incarnation, is_needed, clock
        self._looked_s: float | None = None
        self._step = 0

    @property
    def step(self) -> int:
        """Step of the oldest weights that a live engine serves; 0 if none is known."""
        now_s = self._clock()
        if self._is_needed and (self._looked_s is None or now_s - self._looked_s >= LOOK_S):
            self._looked_s = now_s
            since_s = self._store.now_s() - LIVE_S
            live = [b for b in self._store.heartbeats() if b.role == "actor" and b.time_s > since_s]
            versions = [b.version for b in live if b.version is not None]
            steps = [v.step for v in versions if v.incarnation == self._incarnation]
            self._step = min(steps, default=0)
        return self._step
