"""Round planner: issues all tickets of a round together, and the next round's when R groups are trained. Pure: no JAX.

It serves schedules that publish at the round's end (RolloutPipe, RollPacker, the serial baseline). For a publish every
n steps, `window_planner.WindowPlanner` issues the tickets.
"""

from collections.abc import Callable, Iterable
from typing import Any

from bridge.rollout_types import Sampling, Ticket, Version
from configs.schema import Config
from learner.data.problem import Problem
from learner.schedule import tail_batching
from learner.schedule.ticket_ledger import TicketLedger
from learner.schedule.window_planner import WindowPlanner


class RoundPlanner(TicketLedger):
    """Rounds of R groups. Over-provisioned rounds race, and their losers form long rounds (`tail_batching.py`)."""

    def __init__(
        self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        super().__init__(config.rounds, sampling, next_problem, incarnation=incarnation)
        self._long_prompts = tail_batching.LongPromptQueue(config.rounds.groups_per_round)

    @property
    def long_queue(self) -> list[Ticket]:
        """Prompts that lost a race and wait for a long round, oldest first, as tickets of the rounds they lost."""
        return self._long_prompts.tickets

    def issue(self, *, step: int, num_unclaimed: Callable[[], int] = lambda: 0) -> list[Ticket]:
        """Issues the next round's tickets, for weights of `step` or later, if the current round is consumed."""
        del num_unclaimed  # a round's tickets are issued together
        if self._open:
            return []
        self._arrived = set()
        self.round_is_long = self._long_prompts.fills_a_round
        version = Version(incarnation=self._incarnation, step=step)
        if self.round_is_long:
            prompts = self._long_prompts.take_round()
            num_requests = self._rounds.samples_per_group
        else:
            prompts = [self._next_problem() for _ in range(self._rounds.groups_issued)]
            num_requests = self._rounds.requests_per_group
        return [self._make_ticket(p, round=self.round, num_requests=num_requests, min_version=version) for p in prompts]

    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues tickets until `order` exists, if its round is due."""
        tickets: list[Ticket] = []
        while self._num_issued <= order and (new := self.issue(step=step)):
            tickets += new
        return tickets

    def arrive(self, ticket_id: str) -> list[Ticket]:
        """Records an open ticket's group as arrived; returns the losers of the race that it decides, if any."""
        super().arrive(ticket_id)
        lost = tail_batching.losers(self.open_tickets, self._arrived, num_left_in_round=self.num_left_in_round)
        for ticket in lost:
            del self._open[ticket.id]
        self._long_prompts.defer(lost)
        self._num_deferred += len(lost)
        return lost

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket], long_queue: Iterable[Ticket] = ()) -> None:
        """Restores the state that `get_state` returned; raises ValueError if the ticket counts are inconsistent."""
        super().set_state(state, open_tickets)
        self._long_prompts = tail_batching.LongPromptQueue(self._rounds.groups_per_round)
        self._long_prompts.defer(long_queue)


def planner_of(
    config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
) -> TicketLedger:
    """Returns the planner for `publish.when`: rounds for `round_end`, else a window."""
    if config.publish.when == "round_end":
        return RoundPlanner(config, sampling, next_problem, incarnation=incarnation)
    return WindowPlanner(config, sampling, next_problem, incarnation=incarnation)
