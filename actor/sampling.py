"""Sampling of responses, with a restart of stale ones."""

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
    start_step: int
    """Step of the weights served when it started."""
    task: "asyncio.Task[Sample]"
    is_stale: bool = False
    """True if it was cancelled in order to restart."""


class Sampler:
    """Sampler of responses and episodes that tracks the lag of running requests, in steps."""

    def __init__(
        self, engine: Engine, *, timeline: Timeline, max_lag_steps: int | None, episodes: Episodes | None = None
    ) -> None:
        """`max_lag_steps`, `episodes`: see `Actor`."""
        self.episodes = episodes
        self._engine, self._timeline, self._lag_bound = engine, timeline, max_lag_steps
        self._running: dict[str, _EngineRequest] = {}
        """Running train requests, by id."""
        self._ended: dict[str, int] = {}
        """Start step of the oldest finished sample, per train ticket in service."""

    async def sample(self, ticket: Ticket, index: int) -> Sample:
        """Samples one response of a ticket; restarts it each time it becomes stale (`restart_stale`).

        Raises:
          EpisodeError: the episode could not be played, or was cancelled internally.
          AbortedError, EngineDeadError: see `Engine.sample`.
        """
        request_id = f"{ticket.id}.{index}"
        attempt = 0
        while True:
            version = self._engine.version
            assert version is not None  # admission requires served weights
            request = _EngineRequest(version.step, asyncio.ensure_future(self._respond(ticket, request_id)))
            if ticket.kind == "train":
                self._running[request_id] = request
            try:
                sample = await request.task
            except asyncio.CancelledError as e:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                if not request.is_stale:  # otherwise the group would be built without this sample
                    raise EpisodeError(f"request {request_id} was cancelled unexpectedly") from e
            else:
                if ticket.kind == "train":
                    self._ended[ticket.id] = min(request.start_step, self._ended.get(ticket.id, request.start_step))
                return sample
            finally:
                self._running.pop(request_id, None)
            attempt += 1
            request_id = f"{ticket.id}.{index}+{attempt}"

    def _respond(self, ticket: Ticket, request_id: str) -> Coroutine[Any, Any, Sample]:
        if ticket.task.environment:
            return self._play(ticket, request_id)
        return self._engine.sample(ticket.prompt_tokens, ticket.sampling, request_id=request_id, priority=ticket.order)

    async def _play(self, ticket: Ticket, request_id: str) -> Sample:
        task = ticket.task
        if self.episodes is None:
            raise EpisodeError(
                f"ticket {ticket.id} needs environment {task.environment}, but this actor plays no environments"
            )
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
        """Forgets the finished samples of a ticket that is no longer served."""
        self._ended.pop(ticket_id, None)

    @property
    def stale_tickets(self) -> list[str]:
        """Train tickets with a finished sample that is stale, so that the whole group is stale."""
        oldest = self._oldest_step
        return [] if oldest is None else [id_ for id_, start_step in self._ended.items() if start_step < oldest]

    @property
    def _oldest_step(self) -> int | None:
        """Minimum start step of a trainable sample; None without a lag bound."""
        if self._lag_bound is None or self._engine.version is None:
            return None
        return self._engine.version.step - self._lag_bound

    def restart_stale(self) -> int:
        """Restarts samples that started more than the lag bound behind the served weights; returns their number.

        Implements ROLL Flash's freshness constraint by async ratio (section 4.3): each sample restarts alone, its
        siblings continue. Abort `stale_tickets` first, because restarting their samples cannot make those groups fresh.
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
