"""`Actor`: shared state, the claim and admission loop, limits.

What an actor does beside it (in-flight weight updates, leases, heartbeats, ...) are duties, handed to `Actor.run`:
coroutines that read the actor's state and change it by its methods alone (`actor`).
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from actor.admission import Admission
from actor.engine_protocol import Engine, Sample
from actor.environments.episode import Episodes
from actor.leases import Fence, Leases
from actor.notifier import Notifier
from actor.rewards.scorer import RewardScorer
from actor.rewards.types import Response
from actor.sampling import Sampler
from actor.serving import TicketServer
from actor.weights.client import WeightClient
from bridge.rollout_types import Ticket
from bridge.store.sql.actor_side import ActorStore
from bridge.store.store_types import TOPICS, FencedError, StoreLostError, Topic
from bridge.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorLimits:
    """How long things may take, in seconds, and how often they are tried."""

    lease_s: float
    max_attempts: int = 3
    """How often a ticket is tried whose responses can't be judged."""
    heartbeat_s: float = 2.0
    swap_timeout_s: float = 120.0
    """A weight update that takes longer has hung."""
    stall_s: float = 120.0
    """An engine with requests that samples no token for so long, weight updates aside, has hung."""
    max_unstored_groups: int = 64
    """Groups that are sampled and that the store doesn't have yet, from which on nothing is begun: it is away, or slow,
    or verifiers are."""


CLAIM_S = 1.0
"""How often the store is asked for tickets though nobody said that there are any: a lease may have ended."""


BackgroundTask = Callable[["Actor"], Coroutine[Any, Any, None]]
"""What an actor does beside its loop, for as long as it serves; what it raises ends the actor."""


class Actor:
    """Serves tickets until it is cancelled or something fails for good.

    Duties read its properties and parts, and change it by `hear` to `leave` only.
    """

    def __init__(
        self,
        name: str,
        *,
        store: ActorStore,
        engine: Engine,
        weights: WeightClient,
        rewards: RewardScorer,
        read: Callable[[Ticket, Sample], Response],
        admission: Admission,
        timeline: Timeline,
        limits: ActorLimits,
        drain_before_swap: bool = False,
        max_lag_steps: int | None = None,
        episodes: Episodes | None = None,
    ) -> None:
        """Puts the parts together; nothing starts.

        Args:
          name: the actor's.
          store: where tickets and groups are.
          engine: what samples.
          weights: keeps up with what is published.
          rewards: judges.
          read: from a ticket's sample to the response that verifiers get.
          admission: which tickets are in service.
          timeline: where groups and weight updates are marked.
          limits: how long things may take.
          drain_before_swap: running requests end before weights are swapped.
          max_lag_steps: updates that the start of a running sample may be behind the weights served; None for no bound.
          episodes: plays tickets whose task names an environment; without, those are given up.
        """
        self.name, self.store, self.engine, self.weights = name, store, engine, weights
        self.admission, self.timeline, self.limits, self.drain_before_swap = (
            admission,
            timeline,
            limits,
            drain_before_swap,
        )
        self._changed = Notifier()
        """Something happened that may let a ticket start."""
        self.store_events: Mapping[Topic, Notifier] = {topic: Notifier() for topic in TOPICS}
        """Rung when the store tells of a change (`hear`)."""
        self.sample_ended, self.group_ended = Notifier(), Notifier()
        """Rung when a request ends; and when a group is stored, or given up."""
        self.sampler = Sampler(engine, timeline=timeline, max_lag_steps=max_lag_steps, episodes=episodes)
        self.fence = Fence(
            name, store, timeline=timeline, noticed=self.store_events["weights"]
        )  # who follows them sees to it
        self.holdings = Leases(name, store, lease_s=limits.lease_s)
        self.serving = TicketServer(
            actor=name,
            sampler=self.sampler,
            rewards=rewards,
            read=read,
            admission=admission,
            holdings=self.holdings,
            fence=self.fence,
            timeline=timeline,
            max_attempts=limits.max_attempts,
            changed=self._changed,
            sample_ended=self.sample_ended,
        )
        self._groups: dict[str, asyncio.Task[None]] = {}
        """In progress, by their tickets' ids."""
        self.heartbeat_lock = asyncio.Lock()
        """Held while it says that it lives: one sign after the other, or an older one would be believed."""
        self._engines: dict[int, int] = {}
        self.held: Mapping[str, Ticket] = self.holdings.tickets
        """Leased to this actor, by their ids."""
        self.is_counted = False
        """Whether this engine is among those that the store says serve."""
        self.is_paused = False
        """Nothing is claimed or started for now: weights are replaced on which nothing may start."""
        self.is_shutting_down = False
        """This actor only finishes what it has."""

    @property
    def num_groups(self) -> int:
        """Groups in progress, up to where they are emitted."""
        return len(self._groups)

    async def run(self, duties: Iterable[BackgroundTask]) -> None:
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
                            serving = self._groups[ticket.id] = tasks.create_task(self.serving.serve(ticket))
                            # Not at the end of a coroutine: one that is cancelled before it begins has none.
                            serving.add_done_callback(functools.partial(self._group_ended, ticket.id))
                    await self._changed.wait_past(count, timeout_s=CLAIM_S)
        except* StoreLostError:
            is_lost = True
            raise
        finally:
            if not is_lost:  # else the leases end by themselves
                await self.holdings.release_all()

    def on_store_event(self, topics: Iterable[Topic]) -> None:
        """The store tells that something of these may have changed."""
        for topic in topics:
            self.store_events[topic].notify()
            if topic == "tickets":
                self._changed.notify()

    def pause(self) -> None:
        """Claims and starts nothing until `resume`; what runs goes on."""
        self.is_paused = True

    def resume(self, restarting: Iterable[Ticket] = ()) -> None:
        """Ends a pause; of `restarting` (what `abort_all` returned) those that are still held start again."""
        self.admission.offer(t for t in restarting if t.id in self.held)
        self.is_paused = False
        self._changed.notify()

    async def abort_all(self, ticket_ids: Iterable[str] | None = None) -> list[Ticket]:
        """Ends groups in progress, their requests aborted; returns the tickets of them that are still held.

        Args:
          ticket_ids: whose groups; None for all. Of these, a group on its way to the store is left alone.
        """
        ids = (
            list(self._groups)
            if ticket_ids is None
            else [i for i in ticket_ids if i in self._groups and i in self.held]
        )
        tickets = [self.held[id_] for id_ in ids if id_ in self.held]
        tasks = [self._groups[id_] for id_ in ids]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.holdings.release_unsubmitted()
        return tickets

    async def release_waiting(self) -> None:
        """Gives back the tickets that have not begun: other actors may serve them sooner."""
        tickets = self.admission.waiting
        for ticket in tickets:
            self.admission.remove(ticket.id)
        await self.holdings.release(t.id for t in tickets)

    async def drop_all(self) -> None:
        """Ends every group in progress and forgets its ticket; nothing of it is on its way to the store any more."""
        for ticket in await self.abort_all():
            self.forget(ticket.id)
        await self.holdings.all_submitted()

    def forget(self, ticket_id: str) -> None:
        """Lets go of a ticket that is not ours any more; its requests are aborted.

        Its place in the admission is free when its task has ended, not before: a sample of it may just have finished.
        """
        self.holdings.drop(ticket_id)
        if ticket_id in self._groups:
            self._groups[ticket_id].cancel()
        else:
            self.admission.remove(ticket_id)

    def rebalance(self, engines: Mapping[int, int], *, is_counted: bool) -> None:
        """From here on so many engines share the tickets, this one among them, by the sequences that each runs at once.

        `is_counted`: whether the store has heard that this one serves.
        """
        self.is_counted = is_counted
        if engines == self._engines:
            return
        self._engines = dict(engines)
        self.admission.rebalance(engines)
        self._changed.notify()

    def set_max_sequences(self, max_sequences: int) -> None:
        """From here on so many sequences may run at once; what runs beyond that goes on."""
        self.admission.max_sequences = max_sequences
        self._changed.notify()

    def shut_down(self) -> None:
        """From here on it claims and starts nothing any more and only finishes what it has."""
        self.is_shutting_down = True

    @property
    def _takes_new(self) -> bool:
        num_unstored = len(self._groups) - len(self.admission.in_service)
        is_held_up = num_unstored >= self.limits.max_unstored_groups
        return not (self.is_paused or self.is_shutting_down or is_held_up or self.fence.must_restart)

    async def _claim(self) -> None:
        if self.engine.version is None or self.weights.is_blocked or not self._takes_new:
            return
        while limit := self.admission.num_to_claim():
            try:
                tickets = await self.holdings.claim(
                    limit=limit,
                    width=self.admission.width if self.admission.policy == "frontier" else None,
                    among=1 if self.admission.policy == "window" else self.admission.num_engines,
                    part=self.admission.samples_per_engine,
                    places=self.admission.capacity,
                    all_places=self.admission.all_places,
                    served=self.serving.pop_finished_tickets(),
                )
            except FencedError:
                await self.fence.check()
                return
            await self.fence.check(tickets)
            new = [t for t in tickets if not self.holdings.holds(t)]  # our own lease may have run out
            await self._end_predecessors(new)
            self.holdings.add(new)
            self.admission.offer(new)
            if not new or any(t.kind == "train" for t in new):
                return  # else there may be more evaluations, which take no slot

    async def _end_predecessors(self, tickets: list[Ticket]) -> None:
        """Ends what is here under the ids of tickets that took its place."""
        for ticket in tickets:
            self.forget(ticket.id)
        ending = [self._groups[t.id] for t in tickets if t.id in self._groups]
        if ending:
            await asyncio.wait(ending)

    def _group_ended(self, ticket_id: str, _: asyncio.Task[None]) -> None:
        del self._groups[ticket_id]
        self.admission.remove(ticket_id)
        for bell in (self._changed, self.sample_ended, self.group_ended):
            bell.notify()
