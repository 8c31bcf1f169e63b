"""A window of sequences: as one ends, the next begins. Pure: no jax, no clock.

PipelineRL keeps H sequences in progress (section 4, Algorithm 2). The actors hold that number between them
(`actor.admission`); what is issued here is the backlog that they draw on, an update's groups that nobody has claimed.
Two bounds keep the learner from falling behind: so many complete groups may wait for it (PipelineRL's queues, section
4), and with ROLL Flash's async ratio alpha, or a lag bound, tickets are issued for so many updates ahead of the one
being filled (section 4.3). With redundant prompts (ROLL Flash's redundant environments) an update's orders are a heat,
of more than U (`heats`); what is in service and the backlog are then so much larger, the bounds count the U that win.
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
    """Keeps a backlog for the actors, within the bounds on complete groups and on lag."""

    def __init__(
        self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        """Starts with nothing issued."""
        super().__init__(config.rounds, sampling, next_problem, incarnation=incarnation)
        self._races = Races(config.rounds)
        self._long_prompts = LongPromptQueue(config.rounds.groups_per_update)
        self._backlog = config.rounds.groups_per_race
        self._max_complete = config.queue_groups if config.admission.when_full == "block" else None
        in_service = math.ceil(config.sequences / config.rounds.requests_per_group)
        self._max_open_when_full = config.queue_groups + in_service + self._backlog
        alpha = config.admission.async_ratio
        self._publish_every = config.publish.every_n_steps
        # The updates that tickets may be issued for ahead of the published weights: served in order, a group's lag is
        # at most that, rounded up. All that lead to the next publish have to be among them.
        ahead = [x for x in (alpha, config.rounds.max_lag_steps) if x is not None]
        self._updates_ahead = max(min(ahead), self._publish_every - 1) if ahead else None
        self._max_age = config.max_lag_steps
        self._blocked_by: str | None = None
        self._full_at: int | None = None
        """Open tickets that stay while as many complete groups wait as may; None while they are fewer."""

    @property
    def long_queue(self) -> list[Ticket]:
        """Prompts that lost a race and wait for a long heat, the oldest first; as tickets of the heats they lost."""
        return self._long_prompts.tickets

    def issue(self, *, step: int, num_unclaimed: Callable[[], int] = lambda: 0) -> list[Ticket]:
        """The tickets that the backlog lacks.

        Their samples may come from any weights, but with an async ratio from ones that are at most alpha steps (rounded
        up) old when the ticket's turn comes.
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
        """The tickets that the backlog lacks: a window is filled while the learner waits and computes, too."""
        return self.issue(step=step, num_unclaimed=num_unclaimed)

    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues until `order` exists."""
        tickets: list[Ticket] = []
        while self._num_issued <= order:
            tickets += self._next_tickets(step)
        return tickets

    def arrive(self, ticket_id: str) -> list[Ticket]:
        """Books an open ticket's complete group as here; returns the losers of the race that it decides, if any.

        Raises:
          KeyError: the ticket is not open.
        """
        super().arrive(ticket_id)
        lost = self._races.decide(self._open[ticket_id].order, self.open_tickets, self._arrived)
        for ticket in lost:
            del self._open[ticket.id]
        self._long_prompts.defer(lost)
        self._num_deferred += len(lost)
        return lost

    def consume(self, ticket_id: str) -> Consumed:
        """Books a group as trained.

        Raises:
          KeyError: the ticket is not open; its group must not be trained.
        """
        order = self._open[ticket_id].order
        done = super().consume(ticket_id)
        self._races.consume(order)
        self._races.forget(keep=[t.order for t in self._update])
        return done

    def reopen_update(self) -> list[Ticket]:
        """Opens the tickets of the update last consumed again: its groups were not trained after all."""
        tickets = super().reopen_update()
        self._races.reopen_update(t.order for t in tickets)
        return tickets

    def get_state(self) -> dict[str, Any]:
        """Everything but the tickets' contents (`open_tickets`, `long_queue`); JSON."""
        return super().get_state() | {"heats": self._races.get_state()}

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket], long_queue: Iterable[Ticket] = ()) -> None:
        """Goes to where `get_state` was called.

        Raises:
          ValueError: the books don't add up.
        """
        super().set_state(state, open_tickets)
        self._races.set_state(state["heats"], open_tickets=open_tickets)
        self._long_prompts = LongPromptQueue(self._rounds.groups_per_update)
        self._long_prompts.defer(long_queue)

    def _renewed_version(self, ticket: Ticket) -> Version:
        """Returns the oldest weights for a group that is to be generated again: later ones give it a later deadline."""
        if self._max_age is None:
            return ticket.min_version
        return max(ticket.min_version, Version(incarnation=self._incarnation, step=self.served_step))

    def _coming(self) -> Iterable[Ticket]:
        """Returns open tickets whose groups are still to arrive and be trained; of an open race as many as win."""
        return self._races.wanted(self.open_tickets, self._arrived) if self._races.has_losers else super()._coming()

    def _next_tickets(self, step: int) -> list[Ticket]:
        """One order's, or a heat's."""
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
        """What forbids the next order now."""
        if self._is_full():
            return "queue"
        ahead, per_update = self._updates_ahead, self._rounds.groups_per_update
        if ahead is not None and self._races.num_wanted > (self._published(step) + 1 + ahead) * per_update:
            return "lag"
        return None

    def _is_full(self) -> bool:
        """Whether so many complete groups wait that only a group that is trained makes room for another.

        What is in progress goes on then, and one begins for one that is trained: were nothing issued until the queue
        is short again, the learner would come to wait for as long as a response takes. Groups that came while nobody
        looked, more than may wait beside what is in service, are trained before another begins.
        """
        if self._max_complete is None or len(self._arrived) < self._max_complete:
            self._full_at = None
            return False
        if self._full_at is None:
            self._full_at = min(len(self._open), self._max_open_when_full)
        return len(self._open) >= self._full_at

    def _earliest_step(self, step: int) -> int:
        """Returns the step of the oldest weights that the next order may begin on.

        Ones that are published, so no actor waits for long; and no older ones than every engine serves already. So the
        learner knows a deadline for each group that has not arrived (`deadlines.py`).
        """
        if self._max_age is None:
            return 0
        return max(0, min(max(self._races.next_index - self._max_age, self.served_step), self._published(step)))

    def _published(self, step: int) -> int:
        """The step of the weights that samples begin on now."""
        return step - step % self._publish_every
