"""Window planner: when a sequence finishes, the next one starts. Pure: no JAX, no clock.

PipelineRL keeps H sequences in progress (section 4, Algorithm 2). The actors hold that number between them
(`actor.admission`). This planner issues the backlog from which they claim: an update's groups that are unclaimed.

Two bounds limit how far the learner falls behind. At most so many complete groups may wait (PipelineRL's queues,
section 4). With ROLL Flash's async ratio alpha or a lag bound, tickets are issued at most that many updates ahead of
the published weights (section 4.3).

With redundant prompts (ROLL Flash's redundant environments) the orders of an update form a race of more than U groups
(`tail_batching.py`). The backlog and the groups in service grow accordingly; the lag bound counts the U that win.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from bridge.rollout_types import Sampling, Ticket, Version
from configs.schema import Config
from learner.data.problem import Problem
from learner.schedule.tail_batching import LongPromptQueue, Races
from learner.schedule.ticket_ledger import Consumed, TicketLedger


class WindowPlanner(TicketLedger):
    """Backlog of tickets for the actors, within the bounds on complete groups and on lag."""

    def __init__(
        self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        super().__init__(config.rounds, sampling, next_problem, incarnation=incarnation)
        self._races = Races(config.rounds)
        self._long_prompts = LongPromptQueue(config.rounds.groups_per_update)
        self._backlog = config.rounds.groups_per_race
        self._max_complete = config.queue_groups if config.admission.when_full == "block" else None
        in_service = math.ceil(config.sequences / config.rounds.requests_per_group)
        self._max_open_when_full = config.queue_groups + in_service + self._backlog
        alpha = config.admission.async_ratio
        self._publish_every = config.publish.every_n_steps
        # Updates for which tickets may be issued ahead of the published weights. Served in order, a group's lag is at
        # most that, rounded up. All updates up to the next publish must be among them.
        ahead = [x for x in (alpha, config.rounds.max_lag_steps) if x is not None]
        self._updates_ahead = max(min(ahead), self._publish_every - 1) if ahead else None
        self._max_age = config.max_lag_steps
        self._blocked_by: str | None = None
        self._full_at: int | None = None
        """Open tickets that remain while the queue of complete groups is full; None while it is not."""

    @property
    def long_queue(self) -> list[Ticket]:
        """Prompts that lost a race and wait for a long race, oldest first, as tickets of the races they lost."""
        return self._long_prompts.tickets

    def issue(self, *, step: int, num_unclaimed: Callable[[], int] = lambda: 0) -> list[Ticket]:
        """Issues the tickets that the backlog lacks.

        Their samples may be from any weights. With a lag bound they start on weights that are recent enough when the
        ticket is trained.
        """
        num_lacking = self._backlog - num_unclaimed()
        tickets: list[Ticket] = []
        reason = None
        while len(tickets) < num_lacking and (reason := self._bound(step)) is None:
            tickets += self._next_tickets(step)
        if reason is not None and reason != self._blocked_by:
            self.num_blocked[reason] += 1
        self._blocked_by = reason
        return tickets

    def top_up(self, *, step: int, num_unclaimed: Callable[[], int]) -> list[Ticket]:
        """Issues the tickets that the backlog lacks: a window is filled also while the learner waits and computes."""
        return self.issue(step=step, num_unclaimed=num_unclaimed)

    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues tickets until `order` exists."""
        tickets: list[Ticket] = []
        while self._num_issued <= order:
            tickets += self._next_tickets(step)
        return tickets

    def arrive(self, ticket_id: str) -> list[Ticket]:
        """Records an open ticket's group as arrived; returns the losers of the race that it decides, if any."""
        super().arrive(ticket_id)
        lost = self._races.decide(self._open[ticket_id].order, self.open_tickets, self._arrived)
        for ticket in lost:
            del self._open[ticket.id]
        self._long_prompts.defer(lost)
        self._num_deferred += len(lost)
        return lost

    def consume(self, ticket_id: str) -> Consumed:
        """Records a group as trained; raises KeyError if the ticket is not open."""
        order = self._open[ticket_id].order
        done = super().consume(ticket_id)
        self._races.consume(order)
        self._races.forget(keep=[t.order for t in self._update])
        return done

    def reopen_update(self) -> list[Ticket]:
        """Reopens the tickets of the most recent update, whose groups were consumed but not trained."""
        tickets = super().reopen_update()
        self._races.reopen_update(t.order for t in tickets)
        return tickets

    def get_state(self) -> dict[str, Any]:
        """Returns the state except the tickets' contents (`open_tickets`, `long_queue`); JSON."""
        return super().get_state() | {"heats": self._races.get_state()}

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket], long_queue: Iterable[Ticket] = ()) -> None:
        """Restores the state that `get_state` returned; raises ValueError if the ticket counts are inconsistent."""
        super().set_state(state, open_tickets)
        self._races.set_state(state["heats"], open_tickets=open_tickets)
        self._long_prompts = LongPromptQueue(self._rounds.groups_per_update)
        self._long_prompts.defer(long_queue)

    def _renewed_version(self, ticket: Ticket) -> Version:
        """Returns the oldest weights for a group that is generated again; later weights give it a later deadline."""
        if self._max_age is None:
            return ticket.min_version
        return max(ticket.min_version, Version(incarnation=self._incarnation, step=self.served_step))

    def _coming(self) -> Iterable[Ticket]:
        """Returns open tickets whose groups are still to arrive and be trained; of an open race as many as win."""
        return self._races.wanted(self.open_tickets, self._arrived) if self._races.has_losers else super()._coming()

    def _next_tickets(self, step: int) -> list[Ticket]:
        """Issues the ticket of one order, or all tickets of a race."""
        tickets = [self._next_ticket(step)]
        while self._races.has_losers and not self._races.is_between:
            tickets.append(self._next_ticket(step))
        return tickets

    def _next_ticket(self, step: int) -> Ticket:
        earliest_step = self._earliest_step(step)
        race = self._races.enter(self._num_issued, is_long=self._long_prompts.fills_a_round)
        self.round_is_long = race.is_long
        return self._make_ticket(
            self._long_prompts.take() if race.is_long else self._next_problem(),
            round=race.index * self._rounds.groups_per_update // self._rounds.groups_per_round,
            num_requests=self._rounds.samples_per_group if race.is_long else self._rounds.requests_per_group,
            min_version=Version(incarnation=self._incarnation, step=earliest_step),
        )

    def _bound(self, step: int) -> str | None:
        """Returns the bound that blocks the next order, `queue` or `lag`; None if it may be issued."""
        if self._is_full():
            return "queue"
        ahead, per_update = self._updates_ahead, self._rounds.groups_per_update
        if ahead is not None and self._races.num_wanted > (self._published(step) + 1 + ahead) * per_update:
            return "lag"
        return None

    def _is_full(self) -> bool:
        """Returns True if the queue of complete groups is full and the open tickets reach their limit.

        Groups in progress then continue, and one ticket is issued per trained group. If nothing were issued until the
        queue is short again, the learner would later wait for the duration of a response.
        """
        if self._max_complete is None or len(self._arrived) < self._max_complete:
            self._full_at = None
            return False
        if self._full_at is None:
            self._full_at = min(len(self._open), self._max_open_when_full)
        return len(self._open) >= self._full_at

    def _earliest_step(self, step: int) -> int:
        """Returns the step of the oldest weights for the next order: published, no older than every engine serves.

        Each group that has not arrived therefore has a known deadline (`ticket_ledger.num_sequences`).
        """
        if self._max_age is None:
            return 0
        return max(0, min(max(self._races.next_index - self._max_age, self.served_step), self._published(step)))

    def _published(self, step: int) -> int:
        """Returns the step of the weights last due for a publish, on which samples start."""
        return step - step % self._publish_every
