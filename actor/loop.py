"""The actor's loop: claim tickets, admit them, sample K responses each, judge them, emit the group."""

import asyncio
import contextlib
import dataclasses
import heapq
import time
from collections.abc import Callable

import numpy as np
from absl import logging
from jaxtyping import Int32

from actor.admission import Admission
from actor.duties import duties
from actor.duties.withdrawals import follow_withdrawals
from actor.engine.protocol import Engine
from actor.group_builder import GroupBuilder
from actor.verifiers.pool import VerifierError, VerifierPool
from actor.weights.client import WeightClient
from bridge.store.protocol import GroupStore, UnfitGroupError
from bridge.timeline import Timeline
from bridge.types import Group, Ticket

POLL_S = 0.05
MAX_DROPPED_IN_A_ROW = 32
"""Groups dropped without one success between them; then the verifier is broken and the actor ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take, in seconds."""

    lease_s: float
    max_attempts: int = 3
    """How often a ticket is tried whose responses can't be judged."""
    heartbeat_s: float = 2.0
    swap_s: float = 300.0
    """A weight update that takes longer has hung."""
    stall_s: float = 300.0
    """An engine with requests that samples no token for so long has hung."""


class Actor:
    """Serves tickets until it is cancelled or something fails for good."""

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
    ) -> None:
        """Puts the parts together; nothing starts. `drains`: running requests end before weights are swapped."""
        self.name, self.store, self.engine, self.weights = name, store, engine, weights
        self.admission, self.timeline, self.limits, self.drains = admission, timeline, limits, drains
        self._verifiers, self._decode = verifiers, decode
        self.num_actors = 1
        """Actors that serve, this one among them: they share the tickets."""
        self.held: dict[str, Ticket] = {}
        """Tickets leased to this actor."""
        self.groups: dict[str, asyncio.Task[None]] = {}
        """Groups in progress, up to where they are emitted."""
        self.is_replacing = False
        """Set while weights are being replaced on which nothing may start: an abandoned future's, or drained ones."""
        self.is_leaving = False
        """Set once this actor only finishes what it has (`actor.duties.resizing`)."""
        self.changed = asyncio.Event()
        """Something happened that may let a ticket start."""
        self.num_emitted = 0
        self.num_dropped = 0
        self.num_emitted_tokens = 0
        """Response tokens of emitted groups; what the engine sampled besides went to waste (races, restarts)."""
        self._just_served: list[str] = []
        self._num_dropped_in_a_row = 0
        self._free_lanes = list(range(1, 4097))

    async def run(self) -> None:
        """Serves; what it holds is given back when it ends.

        Raises:
          ExceptionGroup: of what ended it (EngineDeadError, FencedError, ...).
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for duty in (*duties.ALL, follow_withdrawals):
                    tasks.create_task(duty(self))
                while True:
                    await self._claim()
                    if not (self.is_replacing or self.is_leaving):
                        for ticket in self.admission.admit(self.engine.version):
                            self.groups[ticket.id] = tasks.create_task(self._serve(ticket))
                    # Not `wait_for`: Python 3.11's can swallow the cancellation that ends this loop.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await self.changed.wait()
                    self.changed.clear()
        finally:
            await asyncio.to_thread(self.store.release, self.name, list(self.held))

    async def _claim(self) -> None:
        if self.engine.version is None or self.weights.is_stuck or self.is_replacing or self.is_leaving:
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
                    among=self.num_actors,
                    served=served,
                )
            )
            try:
                tickets = await asyncio.shield(claiming)
            except asyncio.CancelledError:
                self.held |= {t.id: t for t in await claiming}  # leased all the same, so to be given back
                raise
            new = [t for t in tickets if not self._holds(t)]  # our own lease may have run out
            await self._end_predecessors(new)
            self.held |= {t.id: t for t in new}
            self.admission.offer(new)
            if not new or any(t.kind == "train" for t in new):
                return  # else there may be more evaluations, which take no slot

    def _holds(self, ticket: Ticket) -> bool:
        """Whether this very ticket is here: another prompt, or newer weights, make it another one."""
        held = self.held.get(ticket.id)
        return (
            held is not None
            and held.min_version == ticket.min_version
            and np.array_equal(held.prompt_tokens, ticket.prompt_tokens)
        )

    async def _end_predecessors(self, tickets: list[Ticket]) -> None:
        """Ends what is here under the ids of tickets that took its place."""
        for ticket in tickets:
            self.forget(ticket.id)
        ending = [self.groups[t.id] for t in tickets if t.id in self.groups]
        if ending:
            await asyncio.wait(ending)

    async def _serve(self, ticket: Ticket) -> None:
        """One ticket, from its requests to its group in the store; of a race the first K to end."""
        start_s = served_s = time.time()
        builder = GroupBuilder(ticket, actor=self.name, started_s=start_s)
        running: dict[int, asyncio.Task[None]] = {}

        async def serve_sample(index: int) -> None:
            nonlocal served_s
            sample = await self.engine.sample(
                ticket.prompt_tokens,
                ticket.sampling,
                request_id=f"{ticket.id}.{index}",
                priority=ticket.order,
            )
            served_s = time.time()
            del running[index]
            num_ended = 1
            if ticket.num_requests - len(running) == ticket.num_samples:
                num_ended += len(running)
                for loser in running.values():
                    loser.cancel()
                running.clear()
            if self.admission.finish_sample(ticket.id, num_ended):
                self._just_served.append(ticket.id)
            self.changed.set()
            builder.add(index, sample, await self._verifiers.score(self._decode(sample.tokens), ticket.task))

        lane = heapq.heappop(self._free_lanes)
        try:
            async with asyncio.TaskGroup() as samples:
                for index in range(ticket.num_requests):
                    running[index] = samples.create_task(serve_sample(index))
            group = builder.build(finished_s=time.time())
            await self._emit(group)
            self._record(group, lane, served_s)
        except* VerifierError as e:
            await self._drop(ticket, e.exceptions[0])
        finally:
            heapq.heappush(self._free_lanes, lane)
            self.groups.pop(ticket.id, None)
            self.admission.remove(ticket.id)
            self.changed.set()

    async def _emit(self, group: Group) -> None:
        # Not held any more: a lease that ends from here on is no reason to stop.
        self.held.pop(group.ticket_id, None)
        try:
            is_new = await asyncio.to_thread(self.store.put_group, group)
        except (KeyError, UnfitGroupError) as e:  # withdrawn, or another prompt has its id now
            logging.info("group unwanted ticket=%s: %s", group.ticket_id, e)
            return
        self.num_emitted += is_new
        self.num_emitted_tokens += is_new * sum(r.tokens.size for r in group.rollouts)
        self._num_dropped_in_a_row = 0

    def forget(self, ticket_id: str) -> None:
        """Lets go of a ticket that is not ours any more; its requests are aborted.

        Its place in the admission is free when its task has ended, not before: a sample of it may just have finished.
        """
        self.held.pop(ticket_id, None)
        if ticket_id in self.groups:
            self.groups[ticket_id].cancel()
        else:
            self.admission.remove(ticket_id)

    async def _drop(self, ticket: Ticket, reason: BaseException) -> None:
        """Gives up a group that can't be judged; its ticket is offered again, a bounded number of times."""
        self.num_dropped += 1
        self._num_dropped_in_a_row += 1
        self.timeline.instant("dropped", ticket=ticket.id, reason=str(reason))
        logging.error("group dropped ticket=%s reason=%s", ticket.id, reason)
        if self._num_dropped_in_a_row >= MAX_DROPPED_IN_A_ROW:
            raise RuntimeError(f"{self._num_dropped_in_a_row} groups in a row could not be judged: {reason}")
        self.held.pop(ticket.id, None)
        await asyncio.to_thread(self._give_up, ticket, str(reason))

    def _give_up(self, ticket: Ticket, reason: str) -> None:
        # Only what is still ours: another actor may have taken it over, and have its group ready.
        if self.store.renew(self.name, [ticket.id], lease_s=self.limits.lease_s):
            self.store.give_up(ticket.id, reason, max_attempts=self.limits.max_attempts)

    def _record(self, group: Group, lane: int, served_s: float) -> None:
        about = {"ticket": group.ticket_id, "kind": group.kind, "round": group.round, "order": group.order}
        self.timeline.span(
            "rollout",
            group.started_s,
            served_s,
            lane=lane,
            tokens=sum(r.tokens.size for r in group.rollouts),
            min_step=group.min_step,
            max_step=group.max_step,
            **about,
        )
        mean = float(np.mean([r.reward for r in group.rollouts]))
        self.timeline.span("reward", served_s, group.finished_s, lane=lane, reward=mean, **about)
