"""Filter and training order of arrived groups: staleness, fences, zero variance, replacement.

It drops groups that must not be trained: from weights of an abandoned branch, over the lag bound, from fenced actors,
invalid, or without learning signal. Dropped groups are counted and their tickets reissued. A group is checked on
arrival and again when it is taken, because the learner's step may have advanced. `launch/tools/plan` runs this code in
virtual time, with groups that are only an `Arrival`.

Training each complete group on arrival is RolloutPipe's CGP (section 3.2); waiting for the round is the papers' serial
baseline.
"""

import bisect
import collections
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from absl import logging
from jaxtyping import Int32

from bridge.rollout_types import Ticket
from configs.schema import Config
from learner.schedule.ticket_ledger import TicketLedger


class Arrival(Protocol):
    """Properties of a complete group that the filter uses (documented at `bridge.rollout_types.Group`)."""

    @property
    def ticket_id(self) -> str:
        """Id of the ticket that it answers."""
        ...

    @property
    def order(self) -> int:
        """Order of its ticket."""
        ...

    @property
    def prompt_tokens(self) -> Int32[np.ndarray, " P"]:
        """Tokens of the prompt."""
        ...

    @property
    def min_step(self) -> int:
        """Step of the oldest weights behind any of its tokens."""
        ...

    @property
    def max_step(self) -> int:
        """Step of the newest weights behind any of its tokens."""
        ...

    @property
    def incarnation(self) -> int:
        """Learner incarnation of the newest weights."""
        ...

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns True if a later incarnation, of those that began at these steps, rolled back past its weights."""
        ...

    @property
    def actors(self) -> frozenset[str]:
        """Names of its actors."""
        ...


class TicketStore(Protocol):
    """Store operations that the filter uses (`bridge.store.sql.learner_side.LearnerStore`)."""

    def put_tickets(self, tickets: Iterable[Ticket]) -> object:
        """Offers tickets."""
        ...

    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        """Deletes these groups."""
        ...

    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> object:
        """Drops these groups and offers their tickets again; of single samples only those older than a step."""
        ...

    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        """Deletes tickets in any state."""
        ...


G = TypeVar("G", bound=Arrival)


MAX_REFUSED_PER_TICKET = 3
"""Invalid groups of a ticket after which another prompt takes its place."""


class GroupFilter(Generic[G]):
    """Groups that wait to be trained: in order of arrival, or with a lag bound by their oldest tokens."""

    def __init__(
        self,
        config: Config,
        *,
        planner: TicketLedger,
        ticket_store: TicketStore,
        has_signal: Callable[[G], bool],
        check: Callable[[G], str | None] = lambda group: None,
        on_filtered: Callable[[G], None] = lambda group: None,
        restores: Mapping[int, int] | None = None,
        fenced_actors: Iterable[str] = (),
        step: int = 0,
    ) -> None:
        """Creates a filter with no waiting groups.

        Args:
          has_signal: returns True if a group has a learning signal; called if `rounds.filter_zero_variance` is on.
          check: returns why a group is invalid (`group_validation.py`), or None.
          on_filtered: called with each group without signal before its prompt is replaced.
          restores: first step of each learner incarnation; identifies weights of abandoned branches.
        """
        self._planner, self._ticket_store, self._has_signal, self._check = planner, ticket_store, has_signal, check
        self._on_filtered = on_filtered
        self._num_refused: collections.Counter[str] = collections.Counter()
        """Groups that `check` rejected, by ticket."""
        self._restores = restores or {}
        self._lag_bound = config.max_lag_steps
        self._filters = config.rounds.filter_zero_variance
        self._max_ready = config.max_ready_groups
        self._ready: collections.deque[G] = collections.deque()
        self._warned_in_round = -1
        self.step = step
        """Step of the learner, which the caller advances."""
        self.fresh_from: int | None = None
        """Step before which no token of an accepted group may be (`learner/train.py`); None for no such bound."""
        self.fenced_actors = set(fenced_actors)
        """Names of actors whose groups are rejected; may grow."""
        self.dropped: collections.Counter[str] = collections.Counter()
        """Cumulative number of dropped groups by reason: abandoned, unwanted, below_min_version, fenced, off_policy,
        stale, overflow, other_prompt, zero_variance, failed, and the reasons of `check`."""

    def receive(self, group: G) -> list[Ticket]:
        """Filters a group on arrival; returns the tickets that lost their round's race with it.

        A group that answers another prompt than its ticket is dropped (`other_prompt`). A restarted learner may assign
        an order to another prompt than before, because replacements and race results depend on the order of arrival.
        The ticket of an invalid group is reissued a bounded number of times. A group without signal is dropped
        (`zero_variance`), and another prompt takes its place. If the group decides its round's race, the losers'
        tickets are withdrawn, and their actors abort them.
        """
        if not self._is_abandoned(group):
            self._catch_up(group.order)
        if reason := self._reason_to_drop(group):
            self._drop(group, reason)
            return []
        ticket = self._planner.ticket(group.ticket_id)
        if not np.array_equal(ticket.prompt_tokens, group.prompt_tokens):
            self._replace(ticket, "other_prompt")
            return []
        if reason := self._check(group):
            self._reject(group, reason)
            return []
        if self._filters and not self._has_signal(group):
            if self._planner.may_replace:
                self._on_filtered(group)
                self._replace(self._planner.replace(group.ticket_id, is_filtered=True), "zero_variance")
                return []
            self._warn()
        losers = self._planner.arrive(group.ticket_id)
        if losers:
            self._ticket_store.withdraw([t.id for t in losers])
        if self._lag_bound is None:
            self._ready.append(group)
        else:
            bisect.insort(self._ready, group, key=lambda g: g.min_step)
        return losers

    def drop_oldest(self) -> None:
        """Drops the oldest groups beyond the number that may wait (PipelineRL's ring buffer)."""
        while self._max_ready is not None and len(self._ready) > self._max_ready:
            group = self._ready.popleft()
            if self._lag_bound is None:
                self._drop(group, "overflow")
            else:  # with its old deadline it would block the other groups, which then overflow as well
                self._planner.forget_arrival(group.ticket_id)
                self._replace(self._planner.renew_one(group.ticket_id), "overflow")

    def take(self, limit: int) -> list[G]:
        """Returns up to `limit` groups to train now; drops groups that must not be trained any more.

        Under a lag bound a group waits while older ones need the free places of the update
        (`ticket_ledger.num_sequences`). The caller records all returned groups as trained before the next call.
        """
        groups: list[G] = []
        while self._ready and len(groups) < limit:
            group = self._ready[0]
            if reason := self._reason_to_drop(group):
                self._drop(self._ready.popleft(), reason)
            elif len(groups) < self._num_places(group):
                groups.append(self._ready.popleft())
            else:
                break
        return groups

    @property
    def waiting(self) -> Sequence[G]:
        """Groups that wait to be trained."""
        return tuple(self._ready)

    def fence(self, actor: str, taken: Iterable[G] = ()) -> None:
        """Rejects an actor's groups and drops its waiting ones immediately, before others generate them again.

        `taken` are those that `take` returned and that are not trained.
        """
        self.fenced_actors.add(actor)
        waiting, self._ready = self._ready, collections.deque[G]()
        for group in (*taken, *waiting):
            if actor in group.actors:
                self._drop(group, "fenced")
            else:
                self._ready.append(group)

    def replace_failed(self, ticket_id: str) -> None:
        """Assigns another prompt to an open ticket that failed."""
        self._replace(self._planner.replace(ticket_id), "failed")

    def drop_older_than(self, step: int) -> set[str]:
        """Forgets the waiting groups with a token of an earlier step; returns the ticket ids of the others."""
        stale = [g for g in self._ready if g.min_step < step]
        self._ready = collections.deque(g for g in self._ready if g.min_step >= step)
        self.dropped["off_policy"] += len(stale)
        for group in stale:
            self._planner.forget_arrival(group.ticket_id)  # otherwise a window would count it as waiting
        return {g.ticket_id for g in self._ready}

    def forget_waiting(self) -> None:
        """Forgets all waiting groups, which the store still has."""
        self._ready.clear()

    def _num_places(self, group: G) -> float:
        """Returns how many groups as old as this one the update being filled can take now."""
        if self._lag_bound is None:
            return math.inf
        return self._planner.num_sequences(group.min_step, step=self.step, max_lag_steps=self._lag_bound)

    def _catch_up(self, order: int) -> None:
        """Reissues tickets that were issued after the restored checkpoint; prompts and ids are deterministic."""
        if tickets := self._planner.issue_up_to(order, step=self.step):
            self._ticket_store.put_tickets(tickets)

    def _is_abandoned(self, group: G) -> bool:
        return group.is_abandoned(self._restores)

    def _reason_to_drop(self, group: G) -> str | None:
        if self._is_abandoned(group):
            return "abandoned"
        if not self._planner.is_open(group.ticket_id):
            return "unwanted"
        if group.min_step < self._planner.ticket(group.ticket_id).min_version.step:
            return "below_min_version"
        if not self.fenced_actors.isdisjoint(group.actors):
            return "fenced"
        if self.fresh_from is not None and group.min_step < self.fresh_from:
            return "off_policy"
        if self._lag_bound is not None and self.step - group.min_step > self._lag_bound:
            return "stale"
        return None

    def _drop(self, group: G, reason: str) -> None:
        self.dropped[reason] += 1
        logging.info(
            "group dropped ticket=%s reason=%s steps=%d..%d incarnation=%d",
            group.ticket_id,
            reason,
            group.min_step,
            group.max_step,
            group.incarnation,
        )
        self._planner.forget_arrival(group.ticket_id)
        if reason == "unwanted":
            self._ticket_store.acknowledge([group.ticket_id])
        elif reason == "stale" and self._lag_bound is not None:
            self._ticket_store.reissue([group.ticket_id], older_than=self.step - self._lag_bound)
        else:
            self._ticket_store.reissue([group.ticket_id])

    def _reject(self, group: G, reason: str) -> None:
        """Reissues the ticket; after `MAX_REFUSED_PER_TICKET` invalid groups another prompt takes its place."""
        self._num_refused[group.ticket_id] += 1
        if self._num_refused[group.ticket_id] < MAX_REFUSED_PER_TICKET:
            self._drop(group, reason)
        else:
            del self._num_refused[group.ticket_id]
            self._replace(self._planner.replace(group.ticket_id), reason)

    def _replace(self, ticket: Ticket, reason: str) -> None:
        self.dropped[reason] += 1
        self._ticket_store.withdraw([ticket.id])
        self._ticket_store.put_tickets([ticket])

    def _warn(self) -> None:
        if self._warned_in_round != self._planner.round:
            self._warned_in_round = self._planner.round
            logging.warning(
                "round %d: zero-variance filter limit reached; passing the remaining groups. Check whether the "
                "problems are too easy or too hard, or the verifier fails (rounds.filter_zero_variance)",
                self._planner.round,
            )


class TrainingOrder(Generic[G]):
    """Order of training: yields the groups to train next, all of one update."""

    def __init__(self, config: Config, planner: TicketLedger, take: Callable[[int], list[G]]) -> None:
        """Creates an order; `take` returns up to so many groups that may be trained now (`GroupFilter.take`)."""
        self._by_round = config.rounds.train_start == "round_complete"
        self._planner, self._take = planner, take
        self._taken: list[G] = []
        """Groups that were taken and wait for more before any is trained."""
        self._chosen: list[G] = []
        """Groups to train next, in this order."""

    def remove(self, actor: str) -> list[G]:
        """Removes and returns the groups of an actor that were taken and not yielded."""
        removed = [group for group in self._taken + self._chosen if actor in group.actors]
        self._taken = [group for group in self._taken if actor not in group.actors]
        self._chosen = [group for group in self._chosen if actor not in group.actors]
        return removed

    def next_groups(self) -> list[G]:
        """Returns the groups to train now; empty if they have not arrived."""
        if not self._chosen:
            left_in_round, left_in_update = self._planner.num_left_in_round, self._planner.num_left_in_update
            least, most = (left_in_round, left_in_round) if self._by_round else (1, left_in_update)
            while taken := self._take(most - len(self._taken)):  # which may fence an actor, and so call `remove`
                self._taken += taken
                if not self._by_round:
                    break  # the caller consumes these before the next `take`
            if len(self._taken) < least:
                return []
            self._chosen, self._taken = self._taken, []
            if self._by_round:
                self._chosen.sort(key=lambda group: group.order)
        count = self._planner.num_left_in_update
        groups, self._chosen = self._chosen[:count], self._chosen[count:]
        return groups
