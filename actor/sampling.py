"""Responses from the engine, begun anew when they get stale."""

import asyncio
import dataclasses
import json
from collections.abc import Coroutine
from typing import Any

from actor.engine_protocol import Engine, Sample
from actor.environments.episode import Episodes
from actor.environments.protocol import EpisodeError
from actor.environments.transcript import EpisodeRequest
from bridge.rollout_types import Ticket
from bridge.timeline import Timeline


@dataclasses.dataclass(eq=False, slots=True)
class _EngineRequest:
    """A request in the engine."""

    start_step: int
    """Of the weights served when it was made."""
    task: "asyncio.Task[Sample]"
    is_stale: bool = False
    """It was ended to begin anew."""


class Sampler:
    """Makes requests, and knows for how long they have run, told in updates of the weights."""

    def __init__(
        self, engine: Engine, *, timeline: Timeline, max_lag_steps: int | None, episodes: Episodes | None = None
    ) -> None:
        """No request runs; `max_lag_steps`, `episodes`: see `Actor`."""
        self.episodes = episodes
        self._engine, self._timeline, self._lag_bound = engine, timeline, max_lag_steps
        self._running: dict[str, _EngineRequest] = {}
        """Those for training, by their ids."""
        self._ended: dict[str, int] = {}
        """Start step of the oldest sample that has ended, by training ticket in service."""

    async def sample(self, ticket: Ticket, index: int) -> Sample:
        """One response of a ticket, begun anew as often as it gets stale (`restart_stale`).

        Raises:
          EpisodeError: it could not be played, or was broken off inside.
          AbortedError, EngineDeadError: as `Engine.sample`.
        """
        request_id = f"{ticket.id}.{index}"
        attempt = 0
        while True:
            version = self._engine.version
            assert version is not None  # or the ticket would not have been admitted
            request = _EngineRequest(version.step, asyncio.ensure_future(self._respond(ticket, request_id)))
            if ticket.kind == "train":
                self._running[request_id] = request
            try:
                sample = await request.task
            except asyncio.CancelledError as e:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                if not request.is_stale:  # or a group would be built without it
                    raise EpisodeError(f"request {request_id} was cancelled, and nobody had asked for it") from e
            else:
                if ticket.kind == "train":
                    self._ended[ticket.id] = min(request.start_step, self._ended.get(ticket.id, request.start_step))
                return sample
            finally:
                self._running.pop(request_id, None)
            attempt += 1
            request_id = f"{ticket.id}.{index}+{attempt}"

    def _respond(self, ticket: Ticket, request_id: str) -> Coroutine[Any, Any, Sample]:
        """A response of one turn, or an episode, as the ticket's task says."""
        if ticket.task.environment:
            return self._play(ticket, request_id)
        return self._engine.sample(ticket.prompt_tokens, ticket.sampling, request_id=request_id, priority=ticket.order)

    async def _play(self, ticket: Ticket, request_id: str) -> Sample:
        task = ticket.task
        if self.episodes is None:
            raise EpisodeError(f"this actor plays no environments, and ticket {ticket.id} is of {task.environment}")
        return await self.episodes.play(
            EpisodeRequest(
                environment=task.environment,
                prompt_tokens=ticket.prompt_tokens,
                row={"answer": task.answer, **json.loads(task.metadata)},
                sampling=ticket.sampling,
                request_id=request_id,
                priority=ticket.order,
            )
        )

    def forget(self, ticket_id: str) -> None:
        """Forgets a ticket's ended samples: it is not served any more."""
        self._ended.pop(ticket_id, None)

    @property
    def stale_tickets(self) -> list[str]:
        """Training tickets whose group is stale whatever becomes of their running samples: one that ended is stale."""
        oldest = self._oldest_step
        return [] if oldest is None else [id_ for id_, start_step in self._ended.items() if start_step < oldest]

    @property
    def _oldest_step(self) -> int | None:
        """Step that a sample must have begun on, or a later one, to be trained; None where nothing gets stale."""
        if self._lag_bound is None or self._engine.version is None:
            return None
        return self._engine.version.step - self._lag_bound

    def restart_stale(self) -> int:
        """Restarts samples that began more than the lag bound behind the weights served; returns how many.

        ROLL Flash's freshness by the async ratio (section 4.3): each sample for itself, its siblings continue. The
        caller has ended `stale_tickets` before, in which that is in vain.
        """
        oldest = self._oldest_step
        if oldest is None:
            return 0
        stale = [r for r in self._running.values() if r.start_step < oldest]
        for request in stale:
            request.is_stale = True
            request.task.cancel()
        if stale:
            self._timeline.instant("stale", samples=len(stale), oldest=oldest)
        return len(stale)
