"""A window of tickets: one more for each group that is trained, so many updates ahead at most. Pure: no jax, no clock.

PipelineRL keeps a fixed number of sequences in progress (section 4, Algorithm 2); ROLL Flash bounds by the async ratio
alpha how many updates ahead of the learner samples may begin (section 4.3).
"""

import math
from collections.abc import Callable

from bridge.types import Sampling, Ticket, Version
from configs.schema import Config
from learner.data.problems import Problem
from learner.schedule.ticket_books import TicketBooks


class AsyncWindow(TicketBooks):
    """Keeps `admission_width` groups outstanding; with an async ratio or a lag bound, only so many updates ahead."""

    def __init__(self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem]) -> None:
        """Starts with nothing issued."""
        super().__init__(config.rounds, sampling, next_problem)
        self._width = config.admission_width
        self._async_ratio = config.admission.async_ratio
        # The updates that tickets may be issued ahead for: served in order, a group's lag is at most that.
        ahead = [x for x in (self._async_ratio, config.rounds.max_lag_steps) if x is not None]
        self._updates_ahead = min(ahead) if ahead else None
        self._publish_every = config.publish.every_n_steps

    def issue(self, *, step: int) -> list[Ticket]:
        """The tickets that the window has room for.

        Their samples may come from any weights, but with an async ratio from ones that are at most alpha steps (rounded
        up) old when the ticket's turn comes.
        """
        tickets: list[Ticket] = []
        while len(self._open) < self._width and self._is_in_reach(step):
            tickets.append(self._next_ticket(step))
        return tickets

    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues until `order` exists."""
        return [self._next_ticket(step) for _ in range(self._num_issued, order + 1)]

    def _next_ticket(self, step: int) -> Ticket:
        return self._make_ticket(
            self._next_problem(),
            round=self._num_issued // self._rounds.groups_per_round,
            num_requests=self._rounds.requests_per_group,
            min_version=Version(incarnation=0, step=self._earliest_step(step)),
        )

    def _is_in_reach(self, step: int) -> bool:
        """Whether the next order's update is at most alpha, or the lag bound, after the one being filled."""
        ahead = self._updates_ahead
        return ahead is None or self._num_issued + 1 <= (step + 1 + ahead) * self._rounds.groups_per_update

    def _earliest_step(self, step: int) -> int:
        """The oldest weights that the next order may begin on; never ones that are not published yet."""
        if self._async_ratio is None:
            return 0
        update = self._num_issued // self._rounds.groups_per_update
        published = step - step % self._publish_every
        return max(0, min(update - math.ceil(self._async_ratio), published))
