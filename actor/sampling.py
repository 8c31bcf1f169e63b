"""Sampling of responses: continuation of handed-over ones, restart of stale ones, and their end at a handover."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping

from actor.engine_protocol import AbortedError, Engine, PartialSample, Sample
from actor.environments.episode import Episodes
from actor.environments.protocol import EpisodeError
from actor.environments.transcript import EpisodeRequest
from bridge.progress_types import RequestProgress, progress_of
from bridge.rollout_types import Ticket, newest_of_each
from bridge.timeline import Timeline


@dataclasses.dataclass(eq=False, slots=True)
class _EngineRequest:
    ticket_id: str
    start_step: int
    """Step of the weights served when it started; of its first token, if another actor began it."""
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
        self.base_steps: Mapping[int, int] = {}
        """Steps at which later learners began, by incarnation, as of the served weights (`Version.is_abandoned`)."""
        self._stopped: set[str] = set()
        """Tickets whose sampling was stopped."""

    async def sample(self, ticket: Ticket, index: int, begun: RequestProgress | None = None) -> Sample:
        """Samples one response of a ticket; restarts it each time it becomes stale (`restart_stale`).

        `begun`, what another actor sampled of the response (`usable`), is continued, or returned if it is finished.
        Raises EpisodeError if the episode could not be played or was cancelled internally, and AbortedError if the
        ticket was stopped (`stop`); see also `Engine.sample`.
        """
        request_id = f"{ticket.id}.{index}"
        attempt = 0
        while True:
            version = self._engine.version
            assert version is not None  # admission requires served weights
            start_step = version.step if begun is None else int(begun.steps[0])
            if begun is not None and begun.finish is not None:
                self._note_end(ticket, start_step)
                return _partial(begun).finished(begun.finish)
            task = asyncio.ensure_future(self._respond(ticket, request_id, begun))
            request = _EngineRequest(ticket.id, start_step, task)
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
                self._note_end(ticket, start_step)
                return sample
            finally:
                self._running.pop(request_id, None)
            attempt, begun = attempt + 1, None
            request_id = f"{ticket.id}.{index}+{attempt}"

    def usable(self, ticket: Ticket) -> dict[int, RequestProgress]:
        """Returns the requests of a ticket's progress to continue, by index.

        The others restart: those of newer, abandoned or stale weights, and those of another ticket.
        """
        progress, served, oldest = progress_of(ticket), self._engine.version, self._oldest_step
        if progress is None or served is None or not progress.fits(ticket):
            return {}
        return {
            r.index: r
            for r in progress.requests
            # A learner that restarted from a checkpoint has a higher incarnation and may serve lower steps.
            if r.newest <= served
            and r.newest.step <= served.step
            and (oldest is None or r.steps[0] >= oldest)
            and not any(v.is_abandoned(self.base_steps) for v in newest_of_each(r.versions))
        }

    def _note_end(self, ticket: Ticket, start_step: int) -> None:
        if ticket.kind == "train":
            self._ended[ticket.id] = min(start_step, self._ended.get(ticket.id, start_step))

    async def _respond(self, ticket: Ticket, request_id: str, begun: RequestProgress | None) -> Sample:
        if ticket.task.environment:
            return await self._play(ticket, request_id)
        partial = None if begun is None else _partial(begun)
        if ticket.id in self._stopped:
            raise AbortedError(f"request {request_id} was stopped", partial)
        return await self._engine.sample(
            ticket.prompt_tokens, ticket.sampling, request_id=request_id, priority=ticket.order, begun=partial
        )

    def set_base_steps(self, base_steps: Mapping[int, int]) -> None:
        """Sets the first step of each incarnation of the learner, which tells abandoned versions."""
        self.base_steps = base_steps

    async def stop(self, ticket_id: str) -> None:
        """Aborts the running requests of a ticket without episodes, and all that start later, until `forget`.

        `sample` raises AbortedError with their tokens. Requests that finish meanwhile return.
        """
        self._stopped.add(ticket_id)
        running = [id_ for id_, request in self._running.items() if request.ticket_id == ticket_id]
        await asyncio.gather(*(self._engine.abort(id_) for id_ in running))

    def is_stopped(self, ticket_id: str) -> bool:
        """Returns True from `stop` to `forget`."""
        return ticket_id in self._stopped

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
        self._stopped.discard(ticket_id)

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


def _partial(begun: RequestProgress) -> PartialSample:
    return PartialSample(
        tokens=begun.tokens,
        logprobs=begun.behavior_logprobs,
        token_versions=begun.versions,
        routed_experts=begun.routed_experts,
    )
