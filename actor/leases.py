"""Leases of claimed tickets, groups being submitted, and the learner's fence.

A ticket is held from its claim until its group is on its way to the store, or until it is given back, given up or lost.
"""

import asyncio
import contextlib
import types
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from absl import logging

from actor.notifier import Notifier
from bridge.rollout_types import Group, Ticket
from bridge.store.sql.actor_side import ActorStore
from bridge.store.store_types import PERMANENT, FencedError
from bridge.timeline import Timeline


class Fence:
    """One actor's. Whether it is up is the store's word; what is here is as of the last look."""

    def __init__(self, actor: str, store: ActorStore, *, timeline: Timeline, noticed: Notifier) -> None:
        """None is known of; `noticed` is rung at each new one."""
        self._actor, self._store, self._timeline, self._noticed = actor, store, timeline, noticed
        self._reason = ""
        """Why the learner has fenced this actor; empty if it hasn't, as far as is known here."""
        self.must_restart = False
        """What was sampled by weights from before the fence may be here: once it isn't, probes are served."""

    def restarted(self) -> None:
        """Weights fetched anew are served, and nothing of those before is left."""
        self.must_restart = False

    async def check(self, tickets: Sequence[Ticket] | None = None) -> None:
        """Whether it is fenced; asked where it was said so (None), or where a claim gave what a fenced one gets too.

        Raises:
          FencedError: it is, and will not be let in again.
        """
        if tickets is not None and not self._reason and all(t.kind != "probe" for t in tickets):
            return
        reason = await asyncio.to_thread(self._store.fenced, self._actor)
        if reason is not None:
            self._on_fenced(reason)
            return
        if self._reason:
            logging.info("actor let in again")
            self._timeline.instant("unfenced")
        self._reason = ""

    def _on_fenced(self, reason: str) -> None:
        if reason.startswith(PERMANENT):
            raise FencedError(f"actor {self._actor} is fenced {reason}")
        if reason != self._reason:  # another one: it answered a probe, and was off again
            logging.error("actor fenced reason=%s", reason)
            self._timeline.instant("fenced", reason=reason)
            self._reason, self.must_restart = reason, True
            self._noticed.notify()


PUTS_AT_ONCE = 4
"""Groups on their way to the store at once: over a slow link they must not keep the leases from being renewed."""


class Leases:
    """One actor's; a call that was begun goes on when its caller is cancelled, and what it leased is booked."""

    def __init__(self, actor: str, store: ActorStore, *, lease_s: float) -> None:
        """Nothing is held; claims are leases of `lease_s`."""
        self._actor, self._store, self._lease_s = actor, store, lease_s
        self._held: dict[str, Ticket] = {}
        self.tickets: Mapping[str, Ticket] = types.MappingProxyType(self._held)
        """Those held, by their ids."""
        self._submit_queue: dict[str, Ticket] = {}
        """Not held any more: a lease that ends while a group is on its way to the store is no reason to stop."""
        self._unput: dict[str, Ticket] = {}
        """Sampled, and their tasks ended before the store was given anything: leased still, to be given back."""
        self._puts = asyncio.Semaphore(PUTS_AT_ONCE)
        self.submitting: set[asyncio.Future[bool]] = set()
        """Of groups that the store is being given now."""

    @property
    def to_renew(self) -> list[str]:
        """Ids of all that must not go to others meanwhile: also what is sampled, and waits for its turn to be put."""
        return [*self._held, *self._submit_queue]

    def holds(self, ticket: Ticket) -> bool:
        """Whether this very ticket is here: another prompt, or newer weights, make it another one."""
        here = self._held.get(ticket.id) or self._submit_queue.get(ticket.id)
        return (
            here is not None
            and here.min_version == ticket.min_version
            and np.array_equal(here.prompt_tokens, ticket.prompt_tokens)
        )

    async def claim(
        self,
        *,
        limit: int,
        width: int | None,
        among: int,
        part: int | None,
        places: int,
        all_places: int,
        served: Sequence[str],
    ) -> list[Ticket]:
        """Leases tickets (`ActorStore.claim`), which are held once they are handed to `hold`.

        Raises:
          FencedError: this actor is fenced.
        """
        claiming = asyncio.ensure_future(
            asyncio.to_thread(
                self._store.claim,
                self._actor,
                limit=limit,
                lease_s=self._lease_s,
                width=width,
                among=among,
                part=part,
                places=places,
                all_places=all_places,
                served=served,
            )
        )
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with contextlib.suppress(FencedError):
                self.add(await claiming)  # leased all the same, so to be given back
            raise

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Books tickets that were claimed."""
        for ticket in tickets:
            self._held[ticket.id] = ticket
            self._unput.pop(ticket.id, None)

    def drop(self, ticket_id: str) -> None:
        """Books that a ticket is not held; one that isn't is fine."""
        self._held.pop(ticket_id, None)

    async def release(self, ticket_ids: Iterable[str]) -> None:
        """Offers tickets to others."""
        ids = list(ticket_ids)
        for id_ in ids:
            self.drop(id_)
        await asyncio.to_thread(self._store.release, self._actor, ids)

    async def release_unsubmitted(self) -> None:
        """Offers others what was sampled for nothing: its task was ended while it waited for its turn to be put."""
        if ids := list(self._unput):
            self._unput.clear()
            await self.release(ids)

    async def release_all(self) -> None:
        """Offers others all that is leased here, apart from groups that the store is being given."""
        ids = [*self._held, *self._unput]
        self._unput.clear()
        await self.release(ids)

    async def fail(self, ticket: Ticket, reason: str, *, max_attempts: int) -> None:
        """Offers a ticket again that could not be served, up to `max_attempts` times in all."""
        self.drop(ticket.id)
        await asyncio.to_thread(self._give_up, ticket, reason, max_attempts)

    def _give_up(self, ticket: Ticket, reason: str, max_attempts: int) -> None:
        # Only what is still ours: another actor may have taken it over, and have its group ready.
        if self._store.renew(self._actor, [ticket.id], lease_s=self._lease_s):
            self._store.fail_ticket(ticket.id, reason, max_attempts=max_attempts)

    async def submit(self, group: Group) -> bool:
        """Gives the store a group, and returns whether it is new; once begun, `all_submitted` waits for it.

        Raises:
          KeyError: its ticket was withdrawn.
          UnfitGroupError: its ticket is another one by now.
          FencedError: this actor is fenced.
        """
        if group.ticket_id in self._held:
            self._submit_queue[group.ticket_id] = self._held.pop(group.ticket_id)
        is_begun = False
        try:
            async with self._puts:
                is_begun = True
                putting = asyncio.ensure_future(asyncio.to_thread(self._store.put_group, group))
                self.submitting.add(putting)
                putting.add_done_callback(self._put_ended)
                return await asyncio.shield(putting)
        finally:
            ticket = self._submit_queue.pop(group.ticket_id, None)
            if ticket is not None and not is_begun:
                self._unput[ticket.id] = ticket

    def _put_ended(self, putting: "asyncio.Future[bool]") -> None:
        self.submitting.discard(putting)
        if not putting.cancelled():
            putting.exception()  # seen by who waits, if anybody still does

    async def all_submitted(self) -> None:
        """Returns when no group is on its way to the store any more."""
        while self.submitting:
            await asyncio.wait(set(self.submitting))
