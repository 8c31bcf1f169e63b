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
from actor.bell import Bell
from actor.engine.protocol import Engine, Sample
from actor.group_builder import GroupBuilder
from actor.lanes import Lanes, record
from actor.race import Race
from actor.verifiers.pool import VerifierError, VerifierPool
from actor.weights.client import WeightClient
from bridge.store.protocol import (
    FOR_GOOD,
    TOPICS,
    ActorStore,
    FencedError,
    StoreLostError,
    Topic,
    UnfitGroupError,
)
from bridge.timeline import Timeline
from bridge.types import Group, Ticket

CLAIM_S = 1.0
"""How often the store is asked for tickets though nobody said that there are any: a lease may have ended."""
PUTS_AT_ONCE = 4
"""Groups on their way to the store at once: over a slow link they must not keep the leases from being renewed."""
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
    max_unstored_groups: int = 64
    """Groups that are sampled and that the store doesn't have yet, from which on nothing is begun: it is away, or slow,
    or verifiers are."""


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
        store: ActorStore,
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
        self._other_engines: list[int] = []
        self._held: dict[str, Ticket] = {}
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._emitting: dict[str, Ticket] = {}
        """Not held any more: a lease that ends while a group is on its way to the store is no reason to stop."""
        self._is_paused = False
        self._is_leaving = False
        self._changed = Bell()
        """Something happened that may let a ticket start."""
        self.told: Mapping[Topic, Bell] = {topic: Bell() for topic in TOPICS}
        """Rung when the store tells of a change (`hear`)."""
        self.sample_ended, self.group_ended = Bell(), Bell()
        """Rung when a request ends; and when a group is stored, or given up."""
        self._putting: set[asyncio.Future[bool]] = set()
        """Groups on their way to the store."""
        self._puts = asyncio.Semaphore(PUTS_AT_ONCE)
        self._fence = ""
        """Why the learner has fenced this actor; empty if it hasn't, as far as is known here."""
        self._is_clean = True
        """Nothing is here that was sampled by weights from before the fence."""
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
        return 1 + len(self._other_engines)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is claimed or started for now: weights are replaced on which nothing may start."""
        return self._is_paused

    @property
    def must_start_over(self) -> bool:
        """Whether it is fenced, and has yet to rid itself of what is here: then it may serve the learner's probes."""
        return not self._is_clean

    @property
    def is_leaving(self) -> bool:
        """Whether this actor only finishes what it has."""
        return self._is_leaving

    async def run(self, duties: Iterable[Duty]) -> None:
        """Serves, the duties beside it; what it holds is given back when it ends.

        Raises:
          ExceptionGroup: of what ended it (EngineDeadError; FencedError where the learner's fence is for good;
            StoreLostError; what a duty raised).
        """
        is_lost = False
        try:
            async with asyncio.TaskGroup() as tasks:
                for duty in duties:
                    tasks.create_task(duty(self))
                while True:
                    count = self._changed.count
                    await self._claim()
                    if self._takes_new:
                        for ticket in self.admission.admit(self.engine.version):
                            self._groups[ticket.id] = tasks.create_task(self._serve(ticket))
                    await self._changed.after(count, timeout_s=CLAIM_S)
        except* StoreLostError:
            is_lost = True
            raise
        finally:
            if not is_lost:  # else the leases end by themselves
                await asyncio.to_thread(self.store.release, self.name, list(self._held))

    def hear(self, topics: Iterable[Topic]) -> None:
        """The store tells that something of these may have changed."""
        for topic in topics:
            self.told[topic].ring()
            if topic == "tickets":
                self._changed.ring()

    def pause(self) -> None:
        """Claims and starts nothing until `resume`; what runs goes on."""
        self._is_paused = True

    def resume(self, restarting: Iterable[Ticket] = ()) -> None:
        """Ends a pause; of `restarting` (what `end_groups` returned) those that are still held start again."""
        self.admission.offer(t for t in restarting if t.id in self._held)
        self._is_paused = False
        self._changed.ring()

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

    async def drop_all(self) -> None:
        """Ends every group in progress and forgets its ticket; nothing of it is on its way to the store any more."""
        for ticket in await self.end_groups():
            self.forget(ticket.id)
        while self._putting:
            await asyncio.wait(set(self._putting))

    def started_over(self) -> None:
        """Weights fetched anew are served, and nothing of those before is left."""
        self._is_clean = True
        self._changed.ring()

    def note_fence(self, reason: str) -> None:
        """Takes in that the learner has fenced this actor: it starts over, and then serves probes until it is let in.

        Raises:
          FencedError: it will not be let in again.
        """
        if reason.startswith(FOR_GOOD):
            raise FencedError(f"actor {self.name} is fenced {reason}")
        if reason != self._fence:  # another one: it answered a probe, and was off again
            logging.error("actor fenced reason=%s", reason)
            self.timeline.instant("fenced", reason=reason)
            self._fence, self._is_clean = reason, False
            self.told["weights"].ring()  # who follows the weights sees to it

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
        if list(other_engines) == self._other_engines:
            return
        self._other_engines = list(other_engines)
        self.admission.share_among(other_engines)
        self._changed.ring()

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
        self._changed.ring()

    def leave(self) -> None:
        """From here on it claims and starts nothing any more and only finishes what it has."""
        self._is_leaving = True

    @property
    def _takes_new(self) -> bool:
        num_unstored = len(self._groups) - len(self.admission.in_service)
        is_held_up = num_unstored >= self.limits.max_unstored_groups
        return not (self._is_paused or self._is_leaving or is_held_up or self.must_start_over)

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
                    among=1 if self.admission.policy == "window" else self.num_actors,
                    served=served,
                )
            )
            try:
                tickets = await asyncio.shield(claiming)
            except asyncio.CancelledError:
                with contextlib.suppress(FencedError):
                    self._held |= {t.id: t for t in await claiming}  # leased all the same, so to be given back
                raise
            except FencedError:
                await self._look_at_fence()
                return
            await self._look_at_fence(tickets)
            new = [t for t in tickets if not self._holds(t)]  # our own lease may have run out
            await self._end_predecessors(new)
            self._held |= {t.id: t for t in new}
            self.admission.offer(new)
            if not new or any(t.kind == "train" for t in new):
                return  # else there may be more evaluations, which take no slot

    async def _look_at_fence(self, tickets: Sequence[Ticket] | None = None) -> None:
        """Whether it is fenced; asked where it was said so (None), or where a claim gave what a fenced one gets too."""
        if tickets is not None and not self._fence and all(t.kind != "probe" for t in tickets):
            return
        reason = await asyncio.to_thread(self.store.fenced, self.name)
        if reason is None:
            if self._fence:
                logging.info("actor let in again")
                self.timeline.instant("unfenced")
            self._fence = ""
        else:
            self.note_fence(reason)

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
            self._changed.ring()
            self.sample_ended.ring()
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
            self._changed.ring()
            self.sample_ended.ring()
            self.group_ended.ring()

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
            async with self._puts:
                is_new = await self._put(group)
        except (KeyError, UnfitGroupError) as e:  # withdrawn, or another prompt has its id now
            logging.info("group unwanted ticket=%s: %s", group.ticket_id, e)
            return
        except FencedError:
            await self._look_at_fence()
            return
        finally:
            self._emitting.pop(group.ticket_id, None)
        self.num_emitted += is_new
        self.num_emitted_tokens += is_new * sum(r.tokens.size for r in group.rollouts)
        self._num_dropped_in_a_row = 0

    async def _put(self, group: Group) -> bool:
        """Hands a group in; once begun it goes on, also if this is cancelled, and `drop_all` waits for it."""
        putting = asyncio.ensure_future(asyncio.to_thread(self.store.put_group, group))
        self._putting.add(putting)
        putting.add_done_callback(self._put_ended)
        return await asyncio.shield(putting)

    def _put_ended(self, putting: "asyncio.Future[bool]") -> None:
        self._putting.discard(putting)
        if not putting.cancelled():
            putting.exception()  # seen by who waits, if anybody still does

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
