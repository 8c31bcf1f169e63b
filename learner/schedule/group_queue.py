"""Complete groups from the store as a grain IterDataset, with state: each element is what is trained next.

The queue decides nothing about training: which groups are kept out is the arrival policy's matter (`group_filter.py`),
which are next the training order's. What it keeps is the ledger: the ids handed out and not yet acknowledged, by which
no group is trained twice.
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
"""How often the queue looks though the store told of nothing: the process may have been asked to stop."""


class GroupQueue(grain.IterDataset[list[Group]]):
    """The store's training groups, those together that are trained together.

    Args:
      config: when training starts.
      planner: the books of the run's tickets.
      store: the run's, which tells of changes.
      tickets: where groups arrive.
      group_filter: decides about each.
      timeline: told when a race is decided.
      on_wait: called on every look that found nothing (heartbeats, watchdogs); may raise.
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
        """Reads nothing yet."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.config, self.planner, self.store, self.group_filter = config, planner, store, group_filter
        self.tickets, self.timeline, self.on_wait = tickets, timeline, on_wait

    def __iter__(self) -> "GroupQueueIterator":
        """One reader; a run has one."""
        return GroupQueueIterator(self)


class GroupQueueIterator(grain.DatasetIterator[list[Group]]):
    """Reads groups once each. Not thread-safe.

    State: the ids handed out and not yet acknowledged. Those are skipped when the store, after a crash,
    hands everything unacknowledged out again.
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
        """The groups to train next, of one update; waits until they are there."""
        start = time.perf_counter()
        while True:
            mark = self._store.mark()
            if groups := self._order.next_groups():
                break
            self._while_waiting()
            # One that an actor claims, or gives up, may have to be followed by another.
            self._store.wait(mark, ("groups", "tickets", "claims"), timeout_s=LOOK_S)
        self.wait_s += time.perf_counter() - start
        return groups

    def poll(self) -> None:
        """Takes in what has arrived, without waiting; called while the learner computes, so that nothing piles up."""
        if self._num_breaks != (num_breaks := self._store.num_breaks):
            self._num_breaks = num_breaks
            # The store may have lost the last ones; those that it knows are left alone.
            self._tickets.put_tickets(self._planner.awaited_tickets)
        while stored := self._tickets.read_groups(after_seq=self._after_seq, limit=64):
            self._after_seq = stored[-1].seq
            for s in stored:
                if s.group.ticket_id in self._seen:
                    continue  # it is in the checkpoint this learner started from, or it is read again after a break
                if num_breaks and self._planner.has_arrived(s.group.ticket_id):
                    continue  # it waits to be trained, and is read again
                self._take_in(s.group)
        self._group_filter.drop_oldest()

    def take_ready(self, limit: int) -> list[Group]:
        """Up to `limit` more groups in order of arrival, without waiting."""
        self.poll()
        groups = self._group_filter.take(limit)
        ids = [g.ticket_id for g in groups]
        self._unacknowledged += ids
        self._seen.update(ids)
        return groups

    def get_state(self) -> dict[str, Any]:
        """The ids handed out and not acknowledged, in order; JSON."""
        return {"unacknowledged": list(self._unacknowledged)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called: reads from the start, skipping those ids."""
        self._group_filter.forget_waiting()
        self._after_seq = 0
        self._unacknowledged = list(state["unacknowledged"])
        self._seen = set(self._unacknowledged)

    def take_back(self, ticket_ids: list[str]) -> None:
        """Forgets groups handed out last: they were not trained after all. Their tickets are the caller's matter."""
        self._forget(ticket_ids)

    def acknowledge(self, ticket_ids: list[str]) -> None:
        """Lets the store forget groups whose training is safe in a checkpoint."""
        self._tickets.acknowledge(ticket_ids)
        self._forget(ticket_ids)

    def _take_in(self, group: Group) -> None:
        if losers := self._group_filter.receive(group):
            self._timeline.instant("round closed", round=group.round, deferred=len(losers))

    def _forget(self, ticket_ids: list[str]) -> None:
        gone = set(ticket_ids)
        self._unacknowledged = [i for i in self._unacknowledged if i not in gone]
        self._seen -= gone
