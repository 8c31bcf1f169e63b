"""Leases of claimed tickets, groups being submitted, and the learner's fence.

A ticket is held from its claim until its group is being submitted, or until it is released, failed or lost.
"""

import asyncio
import contextlib
import types
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from absl import logging

from actor.notifier import Notifier
from bridge.progress_types import ClaimedTicket, TicketProgress, progress_of
from bridge.rollout_types import Group, Ticket
from bridge.store.sql.actor_side import ActorStore
from bridge.store.store_types import PERMANENT, FencedError
from bridge.timeline import Timeline


class Fence:
    """Fence status of one actor. The store decides it; this object caches the last result."""

    def __init__(self, actor: str, store: ActorStore, *, timeline: Timeline, noticed: Notifier) -> None:
        """Starts unfenced; `noticed` is notified at each new fence."""
        self._actor, self._store, self._timeline, self._noticed = actor, store, timeline, noticed
        self._reason = ""
        """Reason that the learner gave for the fence; empty if the actor is not fenced, as last read."""
        self.must_restart = False
        """True while samples of weights from before the fence may remain. No ticket starts until they are discarded."""

    def restarted(self) -> None:
        """Marks that refetched weights are served and all older samples are discarded."""
        self.must_restart = False

    async def check(self, tickets: Sequence[Ticket] | None = None) -> None:
        """Refreshes the fence status from the store. Raises FencedError if the actor is fenced permanently.

        `tickets` is the result of the last claim; None forces a query. A claim that contains a probe may mean that this
        actor is fenced, because fenced actors receive only probes.
        """
        if tickets is not None and not self._reason and all(t.kind != "probe" for t in tickets):
            return
        reason = await asyncio.to_thread(self._store.fenced, self._actor)
        if reason is not None:
            self._on_fenced(reason)
            return
        if self._reason:
            logging.info("fence lifted")
            self._timeline.instant("unfenced")
        self._reason = ""

    def _on_fenced(self, reason: str) -> None:
        if reason.startswith(PERMANENT):
            raise FencedError(f"actor {self._actor} is fenced {reason}")
        if reason != self._reason:  # a new fence: the actor answered a probe and exceeded the tolerance again
            logging.error("actor fenced reason=%s", reason)
            self._timeline.instant("fenced", reason=reason)
            self._reason, self.must_restart = reason, True
            self._noticed.notify()


def _extent(ticket: Ticket) -> tuple[tuple[str, ...], int]:
    """Returns what tells one progress of a ticket from another: its actors and its number of tokens."""
    progress = progress_of(ticket)
    return ((), 0) if progress is None else (progress.actors, progress.num_tokens)


PUTS_AT_ONCE = 4
"""Maximum concurrent group submissions. Over a slow link more would delay lease renewal."""


class Leases:
    """Leases of one actor. A store call continues if its caller is cancelled, and its result is recorded."""

    def __init__(self, actor: str, store: ActorStore, *, lease_s: float) -> None:
        self._actor, self._store, self._lease_s = actor, store, lease_s
        self._held: dict[str, Ticket] = {}
        self.tickets: Mapping[str, Ticket] = types.MappingProxyType(self._held)
        self._submit_queue: dict[str, Ticket] = {}
        """Tickets whose groups are being submitted. They are not held: losing the lease does not cancel a submission.
        """
        self._unput: dict[str, Ticket] = {}
        """Tickets whose tasks were cancelled before submission started: still leased, to be released."""
        self._puts = asyncio.Semaphore(PUTS_AT_ONCE)
        self.submitting: set[asyncio.Future[bool]] = set()
        """Running store submissions; each result is True if the group is new."""

    @property
    def to_renew(self) -> list[str]:
        """Ids to keep leased: held tickets and those queued for submission."""
        return [*self._held, *self._submit_queue]

    def holds(self, ticket: Ticket) -> bool:
        """Returns True if this exact ticket is held: same id, prompt, minimum version and progress."""
        here = self._held.get(ticket.id) or self._submit_queue.get(ticket.id)
        return (
            here is not None
            and here.min_version == ticket.min_version
            and np.array_equal(here.prompt_tokens, ticket.prompt_tokens)
            and _extent(here) == _extent(ticket)
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
    ) -> list[ClaimedTicket]:
        """Leases tickets (`ActorStore.claim`). The caller passes them to `add`, which makes them held."""
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
                self.add(await claiming)  # leased despite the cancellation, so must be released
            raise

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Records claimed tickets as held."""
        for ticket in tickets:
            self._held[ticket.id] = ticket
            self._unput.pop(ticket.id, None)

    def drop(self, ticket_id: str) -> None:
        """Records a ticket as not held. Ignores unknown ids."""
        self._held.pop(ticket_id, None)

    async def release(self, ticket_ids: Iterable[str]) -> None:
        """Releases tickets to other actors."""
        ids = list(ticket_ids)
        for id_ in ids:
            self.drop(id_)
        await asyncio.to_thread(self._store.release, self._actor, ids)

    async def hand_over(self, progress: TicketProgress) -> None:
        """Releases a ticket with what was sampled of it (`ActorStore.hand_over`)."""
        self.drop(progress.ticket_id)
        await asyncio.to_thread(self._store.hand_over, self._actor, progress)

    async def release_unsubmitted(self) -> None:
        """Releases tickets whose tasks were cancelled while they waited to submit."""
        if ids := list(self._unput):
            self._unput.clear()
            await self.release(ids)

    async def release_all(self) -> None:
        """Releases every leased ticket except those whose groups are being submitted."""
        ids = [*self._held, *self._unput]
        self._unput.clear()
        await self.release(ids)

    async def fail(self, ticket: Ticket, reason: str, *, max_attempts: int) -> None:
        """Fails a ticket; the store offers it again, up to `max_attempts` attempts in total."""
        self.drop(ticket.id)
        await asyncio.to_thread(self._give_up, ticket, reason, max_attempts)

    def _give_up(self, ticket: Ticket, reason: str, max_attempts: int) -> None:
        # Only a ticket that is still leased here: another actor may have claimed it and completed its group.
        if self._store.renew(self._actor, [ticket.id], lease_s=self._lease_s):
            self._store.fail_ticket(ticket.id, reason, max_attempts=max_attempts)

    async def submit(self, group: Group) -> bool:
        """Submits a group and returns True if it is new. `all_submitted` waits for a submission that has started.

        Raises KeyError if its ticket was withdrawn, UnfitGroupError if it has changed, and FencedError.
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
            putting.exception()  # marks the exception as retrieved, in case the caller was cancelled

    async def all_submitted(self) -> None:
        """Waits until no group is being submitted."""
        while self.submitting:
            await asyncio.wait(set(self.submitting))
