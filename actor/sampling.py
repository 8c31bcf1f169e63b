"""Responses from the engine, begun anew when they get stale."""

import asyncio
import dataclasses

from actor.engine.protocol import Engine, Sample
from bridge.timeline import Timeline
from bridge.types import Ticket


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    """A request in the engine."""

    start_step: int
    """Of the weights served when it was made."""
    task: "asyncio.Task[Sample]"
    is_stale: bool = False
    """It was ended to begin anew."""


class Sampler:
    """Makes requests, and knows for how long they have run, told in updates of the weights."""

    def __init__(self, engine: Engine, *, timeline: Timeline, lag_bound: int | None) -> None:
        """No request runs; `lag_bound`: see `Actor`."""
        self._engine, self._timeline, self._lag_bound = engine, timeline, lag_bound
        self._running: dict[str, _Request] = {}
        """Those for training, by their ids."""
        self.num_failures = 0
        """Episodes whose environment failed or hung, whether or not a later attempt succeeded."""

    async def sample(self, ticket: Ticket, index: int) -> Sample:
        """One response of a ticket, begun anew as often as it gets stale (`restart_stale`)."""
        request_id = f"{ticket.id}.{index}"
        attempt = 0
        while True:
            version = self._engine.version
            assert version is not None  # or the ticket would not have been admitted
            sampling = self._engine.sample(
                ticket.prompt_tokens, ticket.sampling, request_id=request_id, priority=ticket.order
            )
            request = _Request(version.step, asyncio.ensure_future(sampling))
            if ticket.kind == "train":
                self._running[request_id] = request
            try:
                return await request.task
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not request.is_stale or (task is not None and task.cancelling()):
                    raise
            finally:
                self._running.pop(request_id, None)
            attempt += 1
            request_id = f"{ticket.id}.{index}+{attempt}"

    def restart_stale(self) -> int:
        """Starts samples anew that began more than the lag bound behind the weights served; returns how many.

        ROLL Flash's freshness by the async ratio (section 4.3): each sample for itself, its siblings go on.
        """
        if self._lag_bound is None or self._engine.version is None:
            return 0
        oldest = self._engine.version.step - self._lag_bound
        stale = [r for r in self._running.values() if r.start_step < oldest]
        for request in stale:
            request.is_stale = True
            request.task.cancel()
        if stale:
            self._timeline.instant("stale", samples=len(stale), oldest=oldest)
        return len(stale)
