"""What an actor knows of the learner's fence around it, and what it still has to do before it may serve probes."""

import asyncio
from collections.abc import Sequence

from absl import logging

from actor.bell import Bell
from bridge.store.protocol import FOR_GOOD, ActorStore, FencedError
from bridge.timeline import Timeline
from bridge.types import Ticket


class Fence:
    """One actor's. Whether it is up is the store's word; what is here is as of the last look."""

    def __init__(self, actor: str, store: ActorStore, *, timeline: Timeline, noticed: Bell) -> None:
        """None is known of; `noticed` is rung at each new one."""
        self._actor, self._store, self._timeline, self._noticed = actor, store, timeline, noticed
        self._reason = ""
        """Why the learner has fenced this actor; empty if it hasn't, as far as is known here."""
        self._must_start_over = False

    @property
    def must_start_over(self) -> bool:
        """Whether what was sampled by weights from before the fence may be here: once it isn't, probes are served."""
        return self._must_start_over

    def started_over(self) -> None:
        """Weights fetched anew are served, and nothing of those before is left."""
        self._must_start_over = False

    async def look(self, tickets: Sequence[Ticket] | None = None) -> None:
        """Whether it is fenced; asked where it was said so (None), or where a claim gave what a fenced one gets too.

        Raises:
          FencedError: it is, and will not be let in again.
        """
        if tickets is not None and not self._reason and all(t.kind != "probe" for t in tickets):
            return
        reason = await asyncio.to_thread(self._store.fenced, self._actor)
        if reason is not None:
            self._note(reason)
            return
        if self._reason:
            logging.info("actor let in again")
            self._timeline.instant("unfenced")
        self._reason = ""

    def _note(self, reason: str) -> None:
        if reason.startswith(FOR_GOOD):
            raise FencedError(f"actor {self._actor} is fenced {reason}")
        if reason != self._reason:  # another one: it answered a probe, and was off again
            logging.error("actor fenced reason=%s", reason)
            self._timeline.instant("fenced", reason=reason)
            self._reason, self._must_start_over = reason, True
            self._noticed.ring()
