"""Plans rounds: a round's tickets at once, the next ones when R groups of it are trained. Pure: no jax, no clock.

For schedules that publish at the round's end (RolloutPipe, RollPacker, the serial baseline). Where weights go out every
n steps there are no rounds to plan, and `async_window.WindowPlanner` issues the tickets.
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
    """Rounds of R groups; over-provisioned ones race, and their losers make long rounds (`tail_batching`)."""

    def __init__(
        self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        """Starts before the first round."""
        super().__init__(config.rounds, sampling, next_problem, incarnation=incarnation)
        self._long_prompts = tail_batching.LongPromptQueue(config.rounds.groups_per_round)

    @property
    def long_queue(self) -> list[Ticket]:
        """Prompts that lost a race and wait for a long round, the oldest first; as tickets of the rounds they lost."""
        return self._long_prompts.tickets

    def issue(self, *, step: int, num_unclaimed: Callable[[], int] = lambda: 0) -> list[Ticket]:
        """The next round's tickets, once the one before is consumed; sampled by weights of `step` on."""
        del num_unclaimed  # a round's tickets go out at once
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
        """Issues until `order` exists, if its round is due."""
        tickets: list[Ticket] = []
        while self._num_issued <= order and (new := self.issue(step=step)):
            tickets += new
        return tickets

    def arrive(self, ticket_id: str) -> list[Ticket]:
        """Books an open ticket's complete group as here; returns the losers of the race that it decides, if any.

        Raises:
          KeyError: the ticket is not open.
        """
        super().arrive(ticket_id)
        lost = tail_batching.losers(self.open_tickets, self._arrived, num_left_in_round=self.num_left_in_round)
        for ticket in lost:
            del self._open[ticket.id]
        self._long_prompts.defer(lost)
        self._num_deferred += len(lost)
        return lost

    def set_state(self, state: dict[str, Any], open_tickets: list[Ticket], long_queue: Iterable[Ticket] = ()) -> None:
        """Goes to where `get_state` was called.

        Raises:
          ValueError: the books don't add up.
        """
        super().set_state(state, open_tickets)
        self._long_prompts = tail_batching.LongPromptQueue(self._rounds.groups_per_round)
        self._long_prompts.defer(long_queue)


def planner_of(
    config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
) -> TicketLedger:
    """The planner that `publish.when` asks for."""
    if config.publish.when == "round_end":
        return RoundPlanner(config, sampling, next_problem, incarnation=incarnation)
    return WindowPlanner(config, sampling, next_problem, incarnation=incarnation)
