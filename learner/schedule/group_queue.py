"""Complete groups from the store as a grain IterDataset, in order of arrival, with state.

The queue decides nothing about training; it keeps out what must not be trained: copies, groups made by
weights of an abandoned future, and groups over the lag bound. Those are counted and issued again. A group is looked at
when it arrives and once more when it is handed out, since the learner's step may have moved on while it waited.
"""

import collections
import time
from collections.abc import Callable, Mapping, Set
from typing import Any

import grain
from absl import logging

from bridge.store.protocol import LearnerStore
from bridge.types import Group

POLL_S = 0.002


class GroupQueue(grain.IterDataset[Group]):
    """The store's training groups.

    Args:
      store: where they arrive.
      restores: the step that each learner incarnation began at; tells weights of an abandoned future.
      current_step: reads the learner's step, for the lag bound.
      max_lag_steps: None for no bound.
      is_wanted: whether a group's ticket is open.
      min_step: the earliest step that a group's ticket takes tokens of.
      fenced_actors: names of actors whose groups are refused; may grow.
      while_waiting: called on every poll that found nothing (heartbeats, watchdogs); may raise.
      refuse: called with each group that arrives and has no other fault; a reason keeps it out. Whatever is to become
        of its ticket then is done already.
      on_drop: told of a group that waited and was dropped when its turn came.
      max_ready: groups that may wait; the oldest beyond that are dropped (PipelineRL's ring buffer). None for no bound.
    """

    def __init__(
        self,
        store: LearnerStore,
        *,
        restores: Mapping[int, int],
        current_step: Callable[[], int],
        max_lag_steps: int | None,
        is_wanted: Callable[[Group], bool],
        min_step: Callable[[Group], int] = lambda group: 0,
        fenced_actors: Set[str] = frozenset(),
        while_waiting: Callable[[], None] = lambda: None,
        refuse: Callable[[Group], str | None] = lambda group: None,
        on_drop: Callable[[Group], None] = lambda group: None,
        max_ready: int | None = None,
    ) -> None:
        """Reads nothing yet."""
        super().__init__()
        self.store = store
        self.restores = restores
        self.current_step = current_step
        self.max_lag_steps = max_lag_steps
        self.is_wanted = is_wanted
        self.min_step = min_step
        self.fenced_actors = fenced_actors
        self.while_waiting = while_waiting
        self.refuse = refuse
        self.on_drop = on_drop
        self.max_ready = max_ready

    def __iter__(self) -> "GroupQueueIterator":
        """One reader; a run has one."""
        return GroupQueueIterator(self)


class GroupQueueIterator(grain.DatasetIterator[Group]):
    """Reads groups once each. Not thread-safe.

    State: the ids handed out and not yet acknowledged. Those are skipped when the store, after a crash,
    hands everything unacknowledged out again.
    """

    def __init__(self, queue: GroupQueue) -> None:
        super().__init__()
        self._queue = queue
        self._after_seq = 0
        self._ready: collections.deque[Group] = collections.deque()
        self._unacknowledged: list[str] = []
        self._seen: set[str] = set()
        self.dropped: collections.Counter[str] = collections.Counter()
        """Groups kept out since the start, by reason: abandoned, unwanted, early, fenced, stale, off_policy, overflow,
        failed, and what `refuse` says."""
        self.fresh_from: int | None = None
        """While set, groups with a token of an earlier step are kept out (`learner/schedule/ess_stop.py`)."""
        self.wait_s = 0.0
        """Seconds spent waiting for groups since the start."""

    def __next__(self) -> Group:
        """The next group in order of arrival; waits until there is one."""
        start = time.perf_counter()
        self.poll()
        while not self._has_ready():
            self._queue.while_waiting()
            time.sleep(POLL_S)
            self.poll()
        self.wait_s += time.perf_counter() - start
        return self._hand_out()

    def poll(self) -> None:
        """Takes in what has arrived, without waiting; called while the learner computes, so that nothing piles up."""
        while stored := self._queue.store.read_groups(after_seq=self._after_seq, limit=64):
            self._after_seq = stored[-1].seq
            for s in stored:
                self._take_in(s.group)
        while self._queue.max_ready is not None and len(self._ready) > self._queue.max_ready:
            group = self._ready.popleft()
            self._queue.on_drop(group)
            self._drop(group, "overflow")

    def take_ready(self, limit: int) -> list[Group]:
        """Up to `limit` more groups, without waiting."""
        groups = []
        self.poll()
        while len(groups) < limit and self._has_ready():
            groups.append(self._hand_out())
        return groups

    def get_state(self) -> dict[str, Any]:
        """The ids handed out and not acknowledged, in order; JSON."""
        return {"unacknowledged": list(self._unacknowledged)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` was called: reads from the start, skipping those ids."""
        self._ready.clear()
        self._after_seq = 0
        self._unacknowledged = list(state["unacknowledged"])
        self._seen = set(self._unacknowledged)

    def take_back(self, ticket_ids: list[str]) -> None:
        """Forgets groups handed out last: they were not trained after all. Their tickets are the caller's matter."""
        gone = set(ticket_ids)
        self._unacknowledged = [i for i in self._unacknowledged if i not in gone]
        self._seen -= gone
        self.dropped["off_policy"] += len(gone)

    def keep_fresh(self, step: int) -> set[str]:
        """Forgets the waiting groups with a token of an earlier step; returns the tickets of the others."""
        num_waiting = len(self._ready)
        self._ready = collections.deque(g for g in self._ready if g.min_step >= step)
        self.dropped["off_policy"] += num_waiting - len(self._ready)
        return {g.ticket_id for g in self._ready}

    def acknowledge(self, ticket_ids: list[str]) -> None:
        """Lets the store forget groups whose training is safe in a checkpoint."""
        self._queue.store.acknowledge(ticket_ids)
        gone = set(ticket_ids)
        self._unacknowledged = [i for i in self._unacknowledged if i not in gone]
        self._seen -= gone

    def _hand_out(self) -> Group:
        group = self._ready.popleft()
        self._unacknowledged.append(group.ticket_id)
        self._seen.add(group.ticket_id)
        return group

    def _has_ready(self) -> bool:
        """Whether a group that may be trained is at the head of the line; drops what may not be any more."""
        while self._ready:
            reason = self._objection(self._ready[0])
            if reason is None:
                return True
            group = self._ready.popleft()
            self._queue.on_drop(group)
            self._drop(group, reason)
        return False

    def _take_in(self, group: Group) -> None:
        if group.ticket_id in self._seen:  # trained, and in the checkpoint this learner started from
            return
        if reason := self._objection(group):
            self._drop(group, reason)
        elif reason := self._queue.refuse(group):
            self.dropped[reason] += 1
        else:
            self._ready.append(group)

    def _objection(self, group: Group) -> str | None:
        q = self._queue
        if any(step < group.max_step for later, step in q.restores.items() if later > group.incarnation):
            return "abandoned"
        if not q.is_wanted(group):
            return "unwanted"
        if group.min_step < q.min_step(group):
            return "early"
        if not q.fenced_actors.isdisjoint(group.actors):
            return "fenced"
        if self.fresh_from is not None and group.min_step < self.fresh_from:
            return "off_policy"
        if q.max_lag_steps is not None and q.current_step() - group.min_step > q.max_lag_steps:
            return "stale"
        return None

    def _drop(self, group: Group, reason: str) -> None:
        self.dropped[reason] += 1
        logging.info(
            "group dropped ticket=%s reason=%s steps=%d..%d incarnation=%d",
            group.ticket_id,
            reason,
            group.min_step,
            group.max_step,
            group.incarnation,
        )
        if reason == "unwanted":
            self._queue.store.acknowledge([group.ticket_id])
        else:
            self._queue.store.reissue([group.ticket_id])
