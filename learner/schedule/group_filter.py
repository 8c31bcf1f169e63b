"""Which arrived groups may train (staleness, fences, zero variance, replacement), and in which order; no framework.

It keeps out what must not be trained: groups made by weights of an abandoned future, groups over the lag bound, groups
of fenced actors, groups that can't be right, groups without signal. Those are counted and asked for again. A group is
looked at when it arrives and once more when it is handed out, since the learner's step may have moved on while it
waited. `launch/tools/plan` runs this very code in virtual time, over groups that are no more than an `Arrival`.

Training on each complete group as it arrives is RolloutPipe's CGP (section 3.2); waiting for the round is the papers'
serial baseline.
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
    """What the policy looks at of a complete group (`bridge.rollout_types.Group` says what each is)."""

    @property
    def ticket_id(self) -> str:
        """The ticket that it answers."""
        ...

    @property
    def order(self) -> int:
        """Its ticket's."""
        ...

    @property
    def prompt_tokens(self) -> Int32[np.ndarray, " P"]:
        """What was asked."""
        ...

    @property
    def min_step(self) -> int:
        """Step of the oldest weights behind any of its tokens."""
        ...

    @property
    def max_step(self) -> int:
        """Step of the newest."""
        ...

    @property
    def incarnation(self) -> int:
        """The learner's, of the newest."""
        ...

    def is_abandoned(self, base_steps: Mapping[int, int]) -> bool:
        """Returns True if a later incarnation, of those that began at these steps, went back behind its weights."""
        ...

    @property
    def actors(self) -> frozenset[str]:
        """Who made it."""
        ...


class TicketStore(Protocol):
    """What the policy asks of a store (`bridge.store.sql.learner_side.LearnerStore`)."""

    def put_tickets(self, tickets: Iterable[Ticket]) -> object:
        """Offers tickets."""
        ...

    def acknowledge(self, ticket_ids: Sequence[str]) -> None:
        """Forgets these groups for good."""
        ...

    def reissue(self, ticket_ids: Sequence[str], *, older_than: int | None = None) -> object:
        """Drops these groups and offers their tickets again; of single samples only those begun before a step."""
        ...

    def withdraw(self, ticket_ids: Sequence[str]) -> None:
        """Forgets tickets, wherever they are."""
        ...


G = TypeVar("G", bound=Arrival)


MAX_REFUSED_PER_TICKET = 3
"""How often a ticket is asked for whose groups can't be right; then another prompt takes its place."""


class GroupFilter(Generic[G]):
    """The groups that wait to be trained: in order of arrival, in a lag-bounded window by their oldest tokens."""

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
        """Nothing waits yet.

        Args:
          config: the lag bound, the filter, and how many groups may wait.
          planner: the books of the run's tickets.
          ticket_store: where tickets are offered, withdrawn and asked for again.
          has_signal: whether a group teaches anything; asked where `rounds.filter_zero_variance` is on.
          check: why a group that answers its ticket can't be right (`group_validation.py`); None if it may be.
          on_filtered: told of each group without signal whose prompt another is about to replace.
          restores: the step that each learner incarnation began at; tells weights of an abandoned future.
          fenced_actors: names of actors whose groups are refused.
          step: the learner's.
        """
        self._planner, self._ticket_store, self._has_signal, self._check = planner, ticket_store, has_signal, check
        self._on_filtered = on_filtered
        self._num_refused: collections.Counter[str] = collections.Counter()
        """Groups that `check` refused, by ticket."""
        self._restores = restores or {}
        self._lag_bound = config.max_lag_steps
        self._filters = config.rounds.filter_zero_variance
        self._max_ready = config.max_ready_groups
        self._ready: collections.deque[G] = collections.deque()
        self._warned_in_round = -1
        self.step = step
        """The learner's step; whoever steps says so here."""
        self.fresh_from: int | None = None
        """While set, groups with a token of an earlier step are kept out (`../train.py`)."""
        self.fenced_actors = set(fenced_actors)
        """Names of actors whose groups are refused; may grow."""
        self.dropped: collections.Counter[str] = collections.Counter()
        """Groups kept out since the start, by reason: abandoned, unwanted, below_min_version, fenced, off_policy,
        stale, overflow, other_prompt, zero_variance, failed, and what `check` says."""

    def receive(self, group: G) -> list[Ticket]:
        """Decides about a group that arrives; returns the tickets that lost their round's race with it.

        One that answers another prompt than its ticket has goes (`other_prompt`): a restarted learner may give an order
        to another prompt than before, since which one a replacement took, or who lost a race, depended on the order of
        arrival. One that can't be right goes, and its ticket is asked for anew, a bounded number of times. A group
        without signal goes (`zero_variance`), another prompt taking its place. When the group decides its round's race,
        the losers' tickets are withdrawn: their actors abort them.
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
        """Drops the oldest groups beyond those that may wait (PipelineRL's ring buffer)."""
        while self._max_ready is not None and len(self._ready) > self._max_ready:
            group = self._ready.popleft()
            if self._lag_bound is None:
                self._drop(group, "overflow")
            else:  # with its old deadline it would keep the others waiting, which then overflow as well
                self._planner.forget_arrival(group.ticket_id)
                self._replace(self._planner.renew_one(group.ticket_id), "overflow")

    def take(self, limit: int) -> list[G]:
        """Returns up to `limit` groups to train now; drops groups that must not be trained any more on the way.

        Under a lag bound a group waits while older ones need the places left in the update (`deadlines.py`). The caller
        books all of them as trained before it asks again.
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

    def fence(self, actor: str) -> None:
        """Refuses an actor's groups from now on; those that wait go at once, before others have made them anew."""
        self.fenced_actors.add(actor)
        waiting, self._ready = self._ready, collections.deque[G]()
        for group in waiting:
            if actor in group.actors:
                self._drop(group, "fenced")
            else:
                self._ready.append(group)

    def replace_failed(self, ticket_id: str) -> None:
        """Gives an open ticket that nobody could make a group for another prompt."""
        self._replace(self._planner.replace(ticket_id), "failed")

    def drop_older_than(self, step: int) -> set[str]:
        """Forgets the waiting groups with a token of an earlier step; returns the tickets of the others."""
        stale = [g for g in self._ready if g.min_step < step]
        self._ready = collections.deque(g for g in self._ready if g.min_step >= step)
        self.dropped["off_policy"] += len(stale)
        for group in stale:
            self._planner.forget_arrival(group.ticket_id)  # or a window would take it for one that waits
        return {g.ticket_id for g in self._ready}

    def forget_waiting(self) -> None:
        """Starts over with nothing that waits; the store still has it."""
        self._ready.clear()

    def _num_places(self, group: G) -> float:
        """Returns how many groups as old as this one the update being filled can take now."""
        if self._lag_bound is None:
            return math.inf
        return self._planner.num_sequences(group.min_step, step=self.step, max_lag_steps=self._lag_bound)

    def _catch_up(self, order: int) -> None:
        """Issues what a restarted learner had issued after its checkpoint; prompts and ids are deterministic."""
        if tickets := self._planner.issue_up_to(order, step=self.step):
            self._ticket_store.put_tickets(tickets)

    def _is_abandoned(self, group: G) -> bool:
        """Returns True if a restarted learner went back behind the weights of any of its tokens."""
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
        """Asks for the ticket anew; after `MAX_REFUSED_PER_TICKET` times another prompt takes its place."""
        self._num_refused[group.ticket_id] += 1
        if self._num_refused[group.ticket_id] < MAX_REFUSED_PER_TICKET:
            self._drop(group, reason)
        else:
            del self._num_refused[group.ticket_id]
            self._replace(self._planner.replace(group.ticket_id), reason)

    def _replace(self, ticket: Ticket, reason: str) -> None:
        """Puts a ticket in the place of what the store has under its id."""
        self.dropped[reason] += 1
        self._ticket_store.withdraw([ticket.id])
        self._ticket_store.put_tickets([ticket])

    def _warn(self) -> None:
        if self._warned_in_round != self._planner.round:
            self._warned_in_round = self._planner.round
            logging.warning(
                "round %d: so many prompts had rewards that are all alike that the rest is let through; "
                "are the problems too easy or too hard, or does the verifier fail? (rounds.filter_zero_variance)",
                self._planner.round,
            )


class TrainingOrder(Generic[G]):
    """Hands out the groups to train next, all of one update."""

    def __init__(self, config: Config, planner: TicketLedger, take: Callable[[int], list[G]]) -> None:
        """`take` gives up to so many of the groups that wait and may be trained now (`GroupFilter.take`)."""
        self._by_round = config.rounds.train_start == "round_complete"
        self._planner, self._take = planner, take
        self._taken: list[G] = []
        """Taken, and waiting for more before any is trained."""
        self._chosen: list[G] = []
        """To train next, in that order."""

    def next_groups(self) -> list[G]:
        """The groups to train now; none if they are not there yet."""
        if not self._chosen:
            left_in_round, left_in_update = self._planner.num_left_in_round, self._planner.num_left_in_update
            least, most = (left_in_round, left_in_round) if self._by_round else (1, left_in_update)
            self._taken += self._take(most - len(self._taken))
            if len(self._taken) < least:
                return []
            self._chosen, self._taken = self._taken, []
            if self._by_round:
                self._chosen.sort(key=lambda group: group.order)
        count = self._planner.num_left_in_update
        groups, self._chosen = self._chosen[:count], self._chosen[count:]
        return groups
