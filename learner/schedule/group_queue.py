"""Queue of complete groups from the store, as a grain IterDataset: each element is trained next.

`group_filter.py` selects the groups and orders them. The queue keeps the ids that it returned and that are not
acknowledged yet, so that no group is trained twice.
"""

import time
from collections.abc import Callable
from typing import Any

import grain  # pyright: ignore[reportMissingTypeStubs]  # it has types inside, but no marker

from bridge.rollout_types import Group
from bridge.store.sql.learner_side import LearnerStore
from bridge.timeline import Timeline
from configs.schema import Config
from learner.schedule.group_filter import GroupFilter, TrainingOrder
from learner.schedule.sample_tickets import GroupTickets
from learner.schedule.ticket_ledger import TicketLedger

LOOK_S = 0.2
"""Interval of polls without a notification of the store, in seconds, since the process may have been asked to stop."""


class GroupQueue(grain.IterDataset[list[Group]]):
    """Training groups of the store; each element holds groups that are trained together.

    `on_wait` is called on every poll that finds nothing (heartbeats, watchdogs), and may raise.
    """

    def __init__(
        self,
        config: Config,
        *,
        planner: TicketLedger,
        store: LearnerStore,
        tickets: GroupTickets,
        group_filter: GroupFilter[Group],
        timeline: Timeline,
        on_wait: Callable[[], None],
    ) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.config, self.planner, self.store, self.group_filter = config, planner, store, group_filter
        self.tickets, self.timeline, self.on_wait = tickets, timeline, on_wait

    def __iter__(self) -> "GroupQueueIterator":
        return GroupQueueIterator(self)


class GroupQueueIterator(grain.DatasetIterator[list[Group]]):
    """Reader that returns each group once. Not thread-safe.

    Its state is the list of ids that it returned and that are not acknowledged. After a crash the store returns all
    unacknowledged groups again, and the reader skips those ids.
    """

    def __init__(self, queue: GroupQueue) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._store, self._tickets, self._group_filter = queue.store, queue.tickets, queue.group_filter
        self._timeline, self._while_waiting = queue.timeline, queue.on_wait
        self._order: TrainingOrder[Group] = TrainingOrder(queue.config, queue.planner, self.take_ready)
        self._planner = queue.planner
        self._num_breaks = queue.store.num_breaks
        self._after_seq = 0
        self._unacknowledged: list[str] = []
        self._seen: set[str] = set()
        self.wait_s = 0.0
        """Seconds spent waiting for groups since the start."""

    def __next__(self) -> list[Group]:
        """Returns the groups to train next, all of one update; waits until they are available."""
        start = time.perf_counter()
        while True:
            mark = self._store.mark()
            if groups := self._order.next_groups():
                break
            self._while_waiting()
            # A claim or a failed ticket may make a further ticket necessary.
            self._store.wait(mark, ("groups", "tickets", "claims"), timeout_s=LOOK_S)
        self.wait_s += time.perf_counter() - start
        return groups

    def poll(self) -> None:
        """Reads arrived groups without waiting; called during computation, so that they do not accumulate."""
        if self._num_breaks != (num_breaks := self._store.num_breaks):
            self._num_breaks = num_breaks
            # The store may have lost the last tickets; it ignores tickets that it has.
            self._tickets.put_tickets(self._planner.awaited_tickets)
        while stored := self._tickets.read_groups(after_seq=self._after_seq, limit=64):
            self._after_seq = stored[-1].seq
            for s in stored:
                if s.group.ticket_id in self._seen:
                    continue  # in the checkpoint this learner started from, or read again after a connection break
                if num_breaks and self._planner.has_arrived(s.group.ticket_id):
                    continue  # waits to be trained, and is read again
                self._take_in(s.group)
        self._group_filter.drop_oldest()

    def take_ready(self, limit: int) -> list[Group]:
        """Returns up to `limit` further groups in order of arrival, without waiting."""
        self.poll()
        groups = self._group_filter.take(limit)
        ids = [g.ticket_id for g in groups]
        self._unacknowledged += ids
        self._seen.update(ids)
        return groups

    def get_state(self) -> dict[str, Any]:
        """Returns the ids that were returned and are not acknowledged, in order; JSON."""
        return {"unacknowledged": list(self._unacknowledged)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `get_state` returned: reads from the start and skips those ids."""
        self._group_filter.forget_waiting()
        self._after_seq = 0
        self._unacknowledged = list(state["unacknowledged"])
        self._seen = set(self._unacknowledged)

    def remove(self, actor: str) -> list[Group]:
        """Forgets and returns an actor's groups that wait for others of their round to be trained."""
        groups = self._order.remove(actor)
        self._forget([g.ticket_id for g in groups])
        return groups

    def take_back(self, ticket_ids: list[str]) -> None:
        """Forgets returned groups that were not trained; the caller reopens their tickets."""
        self._forget(ticket_ids)

    def acknowledge(self, ticket_ids: list[str]) -> None:
        """Deletes groups from the store whose training is safe in a checkpoint."""
        self._tickets.acknowledge(ticket_ids)
        self._forget(ticket_ids)

    def _take_in(self, group: Group) -> None:
        if losers := self._group_filter.receive(group):
            self._timeline.instant("round closed", round=group.round, deferred=len(losers))

    def _forget(self, ticket_ids: list[str]) -> None:
        gone = set(ticket_ids)
        self._unacknowledged = [i for i in self._unacknowledged if i not in gone]
        self._seen -= gone
