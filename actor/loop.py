"""Actor: shared state, claim and admission loop, limits.

Background tasks (weight updates, leases, heartbeats, ...) are passed to `Actor.run`. These coroutines read the actor's
state and change it only through its methods.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from actor.admission import Admission
from actor.engine_protocol import Engine, Sample
from actor.environments.episode import Episodes
from actor.leases import Fence, Leases
from actor.notifier import Notifier
from actor.rewards.scorer import RewardScorer
from actor.rewards.types import Response
from actor.sampling import Sampler
from actor.serving import MAX_ATTEMPTS, TicketServer
from actor.teacher_servers import TeacherServers
from actor.weights.client import WeightClient
from bridge.device_turns import EngineTurn
from bridge.progress_types import without_progress
from bridge.rollout_types import Ticket
from bridge.store.sql.actor_side import ActorStore
from bridge.store.sql.database import NO_LIMIT
from bridge.store.store_types import TOPICS, FencedError, StoreLostError, Topic
from bridge.timeline import Timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorLimits:
    """Timeouts and intervals in seconds, and retry limits."""

    lease_s: float
    max_attempts: int = MAX_ATTEMPTS
    """Maximum attempts of a ticket whose responses cannot be scored."""
    heartbeat_s: float = 2.0
    swap_timeout_s: float = 120.0
    """Weight update timeout. On expiry the engine counts as hung."""
    stall_s: float = 120.0
    """Time without a sampled token, outside weight updates, after which an engine with requests counts as hung."""
    max_unstored_groups: int = 64
    """Sampled groups not yet stored at which claims and starts pause. Reached if the store or verifiers are slow or
    unreachable."""


CLAIM_S = 1.0
"""Interval of claims without a store event, in seconds. Another actor's lease may have expired."""


BackgroundTask = Callable[["Actor"], Coroutine[Any, Any, None]]
"""Coroutine that runs concurrently with the actor's loop; an exception in it stops the actor."""


class Actor:
    """Actor process state: serves tickets until it is cancelled or fails permanently.

    Background tasks read its properties and parts, and change it only through `on_store_event` to `shut_down`.
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
        turn: EngineTurn | None = None,
        teachers: TeacherServers | None = None,
    ) -> None:
        """`read` converts a ticket's sample to the response that verifiers receive.

        `drain_before_swap` lets running requests finish before weights are swapped. `max_lag_steps` bounds the lag of a
        running sample's start behind the served weights. Without `episodes`, tickets whose task names an environment
        fail. `turn` is that on devices shared with the learner, held from before the engine's start.
        """
        self.name, self.store, self.engine, self.weights = name, store, engine, weights
        self.admission, self.timeline, self.limits, self.drain_before_swap = (
            admission,
            timeline,
            limits,
            drain_before_swap,
        )
        self.turn = turn
        self._changed = Notifier()
        """Notified when a ticket may be able to start."""
        self.store_events: Mapping[Topic, Notifier] = {topic: Notifier() for topic in TOPICS}
        """Notified when the store reports a change (`on_store_event`)."""
        self.sample_ended, self.group_ended = Notifier(), Notifier()
        """`sample_ended`: notified when a request finishes. `group_ended`: notified when a group is stored or dropped.
        """
        self.sampler = Sampler(engine, timeline=timeline, max_lag_steps=max_lag_steps, episodes=episodes)
        self.fence = Fence(
            name, store, timeline=timeline, noticed=self.store_events["weights"]
        )  # its waiter handles the fence
        self.holdings = Leases(name, store, lease_s=limits.lease_s)
        self.serving = TicketServer(
            actor=name,
            sampler=self.sampler,
            rewards=rewards,
            teachers=teachers or TeacherServers({}),
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
        self.heartbeat_lock = asyncio.Lock()
        """Held while a heartbeat is sent. Concurrent heartbeats could arrive out of order."""
        self._engines: dict[int, int] = {}
        self.held: Mapping[str, Ticket] = self.holdings.tickets
        self.is_counted = False
        """True if the store's engine counts include this engine."""
        self.is_paused = False
        """True while claims and starts are paused for a weight update."""
        self.is_asleep = False
        """True while others train on the engine's devices; it then serves no weights."""
        self.wake_s: float | None = None
        """Seconds from the last return of the engine's devices until it served again."""
        self.is_shutting_down = False
        """True once this actor only finishes what it has."""

    @property
    def num_groups(self) -> int:
        """Groups in progress, until they are submitted or dropped."""
        return len(self._groups)

    async def run(self, duties: Iterable[BackgroundTask]) -> None:
        """Serves tickets concurrently with the background tasks; releases held tickets on exit.

        Raises an ExceptionGroup of EngineDeadError, FencedError (permanent fence), StoreLostError, or what a background
        task raised.
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
                            # A callback, not a `finally` in the coroutine: a task that is cancelled before its first
                            # step runs no code.
                            serving.add_done_callback(functools.partial(self._group_ended, ticket.id))
                    await self._changed.wait_past(count, timeout_s=CLAIM_S)
        except* StoreLostError:
            is_lost = True
            raise
        finally:
            if not is_lost:  # if lost, the leases expire
                await self.holdings.release_all()

    def on_store_event(self, topics: Iterable[Topic]) -> None:
        """Notifies the waiters of the topics that may have changed."""
        for topic in topics:
            self.store_events[topic].notify()
            if topic == "tickets":
                self._changed.notify()

    def pause(self) -> None:
        """Stops claims and starts until `resume`; running requests continue."""
        self.is_paused = True

    def resume(self, restarting: Iterable[Ticket] = ()) -> None:
        """Ends a pause; tickets of `restarting` (from `abort_all`) that are still held begin anew."""
        self.admission.offer(without_progress(t) for t in restarting if self.held.get(t.id) is t)
        self.is_paused = False
        self._changed.notify()

    async def abort_all(self, ticket_ids: Iterable[str] | None = None) -> list[Ticket]:
        """Cancels groups in progress, which aborts their requests; returns their tickets that are still held.

        Without `ticket_ids` it cancels all groups, otherwise none that are being submitted.
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
        """Releases tickets that have not started, so that other actors can serve them sooner."""
        tickets = self.admission.waiting
        for ticket in tickets:
            self.admission.remove(ticket.id)
        await self.holdings.release(t.id for t in tickets)

    async def drop_all(self) -> None:
        """Aborts and forgets every group in progress, and waits for running submissions."""
        for ticket in await self.abort_all():
            self.forget(ticket.id)
        await self.holdings.all_submitted()

    def forget(self, ticket_id: str) -> None:
        """Forgets a ticket that is no longer leased and aborts its requests.

        Its admission slot frees only when its task has ended, because one of its samples may just have finished.
        """
        self.holdings.drop(ticket_id)
        if ticket_id in self._groups:
            self._groups[ticket_id].cancel()
        else:
            self.admission.remove(ticket_id)

    def rebalance(self, engines: Mapping[int, int], *, is_counted: bool) -> None:
        """Updates this engine's share of the tickets; `is_counted`: the store has recorded that this engine serves.

        `engines` counts the engines that share the tickets, this one included, by concurrent sequences per engine.
        """
        self.is_counted = is_counted
        if engines == self._engines:
            return
        self._engines = dict(engines)
        self.admission.rebalance(engines)
        self._changed.notify()

    async def hand_over(self) -> None:
        """Stops sampling of training tickets; the next actor continues (`TicketServer.hand_over`)."""
        await self.serving.hand_over()

    def fall_asleep(self) -> None:
        """Records that others train on the engine's devices, so it serves no weights."""
        self.is_asleep = True

    def wake_up(self, wake_s: float) -> None:
        """Records that the engine serves again, `wake_s` seconds after its devices were returned."""
        self.is_asleep, self.wake_s = False, wake_s

    def shut_down(self) -> None:
        """Stops claims and starts permanently; groups in progress finish."""
        self.is_shutting_down = True

    @property
    def _takes_new(self) -> bool:
        num_unstored_tickets = len(self._groups) - len(self.admission.in_service)
        is_held_up = num_unstored_tickets >= self.limits.max_unstored_groups * self.admission.tickets_per_group
        return not (self.is_paused or self.is_shutting_down or is_held_up or self.fence.must_restart)

    async def _claim(self) -> None:
        if self.engine.version is None or self.weights.is_blocked or not self._takes_new:
            return
        # A full engine claims nothing and only reports what it has served: others may take those groups' places.
        while (limit := self.admission.num_to_claim()) or self.serving.has_unreported_tickets:
            try:
                tickets = await self.holdings.claim(
                    limit=limit,
                    width=(self.admission.width or NO_LIMIT) if self.admission.policy == "frontier" else None,
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
            new = [t for t in tickets if not self.holdings.holds(t)]  # this actor's own lease may have expired
            await self._end_predecessors(new)
            self.holdings.add(new)
            self.admission.offer(new)
            if not new or any(t.kind == "train" for t in new):
                return  # otherwise more evaluations may be available, which take no slot

    async def _end_predecessors(self, tickets: Sequence[Ticket]) -> None:
        """Aborts groups in progress that have the ids of reissued tickets."""
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
