"""The actor's loop: claim tickets, admit them, sample K responses each, judge them, emit the group.

What an actor does beside it (in-flight weight updates, leases, heartbeats, ...) are duties, handed to `Actor.run`:
coroutines that read the actor's state and change it by its methods alone (`actor.duties`).
"""

import asyncio
import contextlib
import dataclasses
import time
import types
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int32

from actor.admission import Admission
from actor.engine.protocol import Engine, Sample
from actor.group_builder import GroupBuilder
from actor.lanes import Lanes, record
from actor.race import Race
from actor.verifiers.pool import VerifierError, VerifierPool
from actor.weights.client import WeightClient
from bridge.store.protocol import GroupStore, UnfitGroupError
from bridge.timeline import Timeline
from bridge.types import Group, Ticket

CLAIM_POLL_S = 0.05
"""How often the store is asked for tickets while nothing happens here."""
MAX_DROPPED_IN_A_ROW = 32
"""Groups dropped without one success between them; then the verifier is broken and the actor ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take, in seconds; not to be mixed up with `EngineLimits`, how large the engine is."""

    lease_s: float
    max_attempts: int = 3
    """How often a ticket is tried whose responses can't be judged."""
    heartbeat_s: float = 2.0
    swap_s: float = 120.0
    """A weight update that takes longer has hung."""
    stall_s: float = 120.0
    """An engine with requests that samples no token for so long, weight updates aside, has hung."""


@dataclasses.dataclass(eq=False, slots=True)
class _Sampling:
    """A request in the engine."""

    start_step: int
    """Of the weights served when it was made."""
    task: "asyncio.Task[Sample]"
    is_stale: bool = False
    """It was ended to begin anew."""


Duty = Callable[["Actor"], Coroutine[Any, Any, None]]
"""What an actor does beside its loop, for as long as it serves; what it raises ends the actor."""


class Actor:
    """Serves tickets until it is cancelled or something fails for good.

    Duties read its properties and parts, and change it by `pause` to `leave` only.
    """

    def __init__(
        self,
        name: str,
        *,
        store: GroupStore,
        engine: Engine,
        weights: WeightClient,
        verifiers: VerifierPool,
        decode: Callable[[Int32[np.ndarray, " T"]], str],
        admission: Admission,
        timeline: Timeline,
        limits: Limits,
        drains: bool = False,
        lag_bound: int | None = None,
    ) -> None:
        """Puts the parts together; nothing starts.

        Args:
          name: the actor's.
          store: where tickets and groups are.
          engine: what samples.
          weights: keeps up with what is published.
          verifiers: judge.
          decode: from tokens to text.
          admission: which tickets are in service.
          timeline: where groups and weight updates are marked.
          limits: how long things may take.
          drains: running requests end before weights are swapped.
          lag_bound: updates that the start of a running sample may be behind the weights served; None for no bound.
        """
        self.name, self.store, self.engine, self.weights = name, store, engine, weights
        self.admission, self.timeline, self.limits, self.drains = admission, timeline, limits, drains
        self._verifiers, self._decode, self._lag_bound = verifiers, decode, lag_bound
        self._num_actors = 1
        self._held: dict[str, Ticket] = {}
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._emitting: dict[str, Ticket] = {}
        """Not held any more: a lease that ends while a group is on its way to the store is no reason to stop."""
        self._is_paused = False
        self._is_leaving = False
        self._changed = asyncio.Event()
        """Something happened that may let a ticket start."""
        self.num_emitted = 0
        self.num_dropped = 0
        self.num_emitted_tokens = 0
        """Response tokens of emitted groups; what the engine sampled besides went to waste (races, restarts)."""
        self._just_served: list[str] = []
        self._num_dropped_in_a_row = 0
        self._lanes = Lanes()
        self._sampling: dict[str, _Sampling] = {}
        """By request."""

    @property
    def held(self) -> Mapping[str, Ticket]:
        """Tickets leased to this actor, by their ids."""
        return types.MappingProxyType(self._held)

    @property
    def num_groups(self) -> int:
        """Groups in progress, up to where they are emitted."""
        return len(self._groups)

    @property
    def num_actors(self) -> int:
        """Actors that serve, this one among them: they share the tickets."""
        return self._num_actors

    @property
    def is_paused(self) -> bool:
        """Whether nothing is claimed or started for now: weights are replaced on which nothing may start."""
        return self._is_paused

    @property
    def is_leaving(self) -> bool:
        """Whether this actor only finishes what it has."""
        return self._is_leaving

    async def run(self, duties: Iterable[Duty]) -> None:
        """Serves, the duties beside it; what it holds is given back when it ends.

        Raises:
          ExceptionGroup: of what ended it (EngineDeadError; FencedError by the learner's parity fence; what a duty
            raised).
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for duty in duties:
                    tasks.create_task(duty(self))
                while True:
                    await self._claim()
                    if self._takes_new:
                        for ticket in self.admission.admit(self.engine.version):
                            self._groups[ticket.id] = tasks.create_task(self._serve(ticket))
                    # Not `wait_for`: Python 3.11's can swallow the cancellation that ends this loop.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(CLAIM_POLL_S):
                            await self._changed.wait()
                    self._changed.clear()
        finally:
            await asyncio.to_thread(self.store.release, self.name, list(self._held))

    def pause(self) -> None:
        """Claims and starts nothing until `resume`; what runs goes on."""
        self._is_paused = True

    def resume(self, restarting: Iterable[Ticket] = ()) -> None:
        """Ends a pause; of `restarting` (what `end_groups` returned) those that are still held start again."""
        self.admission.offer(t for t in restarting if t.id in self._held)
        self._is_paused = False
        self._changed.set()

    async def end_groups(self) -> list[Ticket]:
        """Ends every group in progress, its requests aborted; returns the tickets of them that are held on."""
        tickets = [self._held[id_] for id_ in self._groups if id_ in self._held]
        tasks = list(self._groups.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return tickets

    async def give_back_waiting(self) -> None:
        """Gives back the tickets that have not begun: other actors may serve them sooner."""
        tickets = self.admission.waiting
        for ticket in tickets:
            self.admission.remove(ticket.id)
            self._held.pop(ticket.id, None)
        await asyncio.to_thread(self.store.release, self.name, [t.id for t in tickets])

    def forget(self, ticket_id: str) -> None:
        """Lets go of a ticket that is not ours any more; its requests are aborted.

        Its place in the admission is free when its task has ended, not before: a sample of it may just have finished.
        """
        self._held.pop(ticket_id, None)
        if ticket_id in self._groups:
            self._groups[ticket_id].cancel()
        else:
            self.admission.remove(ticket_id)

    def share_among(self, other_engines: Sequence[int]) -> None:
        """From here on actors with engines of so many sequences each share the tickets with this one."""
        self._num_actors = 1 + len(other_engines)
        self.admission.share_among(other_engines)

    def restart_stale(self) -> int:
        """Starts samples anew that began more than the lag bound behind the weights served; returns how many.

        ROLL Flash's freshness by the async ratio (section 4.3): each sample for itself, its siblings go on.
        """
        if self._lag_bound is None or self.engine.version is None:
            return 0
        oldest = self.engine.version.step - self._lag_bound
        stale = [s for s in self._sampling.values() if s.start_step < oldest]
        for sampling in stale:
            sampling.is_stale = True
            sampling.task.cancel()
        if stale:
            self.timeline.instant("stale", samples=len(stale), oldest=oldest)
        return len(stale)

    def bound_sequences(self, max_sequences: int) -> None:
        """From here on so many sequences may run at once; what runs beyond that goes on."""
        self.admission.max_sequences = max_sequences
        self._changed.set()

    def leave(self) -> None:
        """From here on it claims and starts nothing any more and only finishes what it has."""
        self._is_leaving = True

    @property
    def _takes_new(self) -> bool:
        return not (self._is_paused or self._is_leaving)

    async def _claim(self) -> None:
        if self.engine.version is None or self.weights.is_stuck or not self._takes_new:
            return
        while limit := self.admission.num_to_claim():
            served, self._just_served = self._just_served, []
            claiming = asyncio.ensure_future(
                asyncio.to_thread(
                    self.store.claim,
                    self.name,
                    limit=limit,
                    lease_s=self.limits.lease_s,
                    width=self.admission.width if self.admission.policy == "frontier" else None,
                    among=1 if self.admission.policy == "window" else self._num_actors,
                    served=served,
                )
            )
            try:
                tickets = await asyncio.shield(claiming)
            except asyncio.CancelledError:
                self._held |= {t.id: t for t in await claiming}  # leased all the same, so to be given back
                raise
            new = [t for t in tickets if not self._holds(t)]  # our own lease may have run out
            await self._end_predecessors(new)
            self._held |= {t.id: t for t in new}
            self.admission.offer(new)
            if not new or any(t.kind == "train" for t in new):
                return  # else there may be more evaluations, which take no slot

    def _holds(self, ticket: Ticket) -> bool:
        """Whether this very ticket is here: another prompt, or newer weights, make it another one."""
        held = self._held.get(ticket.id) or self._emitting.get(ticket.id)
        return (
            held is not None
            and held.min_version == ticket.min_version
            and np.array_equal(held.prompt_tokens, ticket.prompt_tokens)
        )

    async def _end_predecessors(self, tickets: list[Ticket]) -> None:
        """Ends what is here under the ids of tickets that took its place."""
        for ticket in tickets:
            self.forget(ticket.id)
        ending = [self._groups[t.id] for t in tickets if t.id in self._groups]
        if ending:
            await asyncio.wait(ending)

    async def _serve(self, ticket: Ticket) -> None:
        """One ticket, from its requests to its group in the store; of redundant samples those that win the race."""
        start_s = served_s = time.time()
        builder = GroupBuilder(ticket, actor=self.name, started_s=start_s)
        race = Race(num_samples=ticket.num_samples, num_requests=ticket.num_requests)
        requests: list[asyncio.Task[None]] = []

        async def serve_sample(index: int) -> None:
            nonlocal served_s
            sample = await self._sample(ticket, index)
            served_s = time.time()
            losers = race.end(index)
            for loser in losers:
                requests[loser].cancel()
            if self.admission.finish_sample(ticket.id, 1 + len(losers)):
                self._just_served.append(ticket.id)
            self._changed.set()
            text = self._decode(sample.tokens)
            builder.add(index, sample, await self._verifiers.score(text, ticket.task, sample.finish))

        lane = self._lanes.take()
        try:
            async with asyncio.TaskGroup() as samples:
                for index in range(ticket.num_requests):
                    requests.append(samples.create_task(serve_sample(index)))
            group = builder.build(finished_s=time.time())
            await self._emit(group)
            record(self.timeline, group, lane=lane, served_s=served_s)
        except* VerifierError as e:
            await self._drop(ticket, e.exceptions[0])
        finally:
            self._lanes.give_back(lane)
            self._groups.pop(ticket.id, None)
            self.admission.remove(ticket.id)
            self._changed.set()

    async def _sample(self, ticket: Ticket, index: int) -> Sample:
        """One response, begun anew as often as it gets stale (`restart_stale`)."""
        request_id = f"{ticket.id}.{index}"
        attempt = 0
        while True:
            version = self.engine.version
            assert version is not None  # or the ticket would not have been admitted
            request = self.engine.sample(
                ticket.prompt_tokens, ticket.sampling, request_id=request_id, priority=ticket.order
            )
            sampling = _Sampling(version.step, asyncio.ensure_future(request))
            if ticket.kind == "train":
                self._sampling[request_id] = sampling
            try:
                return await sampling.task
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not sampling.is_stale or (task is not None and task.cancelling()):
                    raise
            finally:
                self._sampling.pop(request_id, None)
            attempt += 1
            request_id = f"{ticket.id}.{index}+{attempt}"

    async def _emit(self, group: Group) -> None:
        if group.ticket_id in self._held:
            self._emitting[group.ticket_id] = self._held.pop(group.ticket_id)
        try:
            is_new = await asyncio.to_thread(self.store.put_group, group)
        except (KeyError, UnfitGroupError) as e:  # withdrawn, or another prompt has its id now
            logging.info("group unwanted ticket=%s: %s", group.ticket_id, e)
            return
        finally:
            self._emitting.pop(group.ticket_id, None)
        self.num_emitted += is_new
        self.num_emitted_tokens += is_new * sum(r.tokens.size for r in group.rollouts)
        self._num_dropped_in_a_row = 0

    async def _drop(self, ticket: Ticket, reason: BaseException) -> None:
        """Gives up a group that can't be judged; its ticket is offered again, a bounded number of times."""
        self.num_dropped += 1
        self._num_dropped_in_a_row += 1
        self.timeline.instant("dropped", ticket=ticket.id, reason=str(reason))
        logging.error("group dropped ticket=%s reason=%s", ticket.id, reason)
        if self._num_dropped_in_a_row >= MAX_DROPPED_IN_A_ROW:
            raise RuntimeError(f"{self._num_dropped_in_a_row} groups in a row could not be judged: {reason}")
        self._held.pop(ticket.id, None)
        await asyncio.to_thread(self._give_up, ticket, str(reason))

    def _give_up(self, ticket: Ticket, reason: str) -> None:
        # Only what is still ours: another actor may have taken it over, and have its group ready.
        if self.store.renew(self.name, [ticket.id], lease_s=self.limits.lease_s):
            self.store.give_up(ticket.id, reason, max_attempts=self.limits.max_attempts)
