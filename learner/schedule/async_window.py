"""A window of sequences: as one ends, the next begins. Pure: no jax, no clock.

PipelineRL keeps H sequences in progress (section 4, Algorithm 2). The actors hold that number between them
(`actor.admission`); what is issued here is the backlog that they draw on, an update's groups that nobody has claimed.
Two bounds keep the learner from falling behind: so many complete groups may wait for it (PipelineRL's queues, section
4), and with ROLL Flash's async ratio alpha, or a lag bound, tickets are issued for so many updates ahead of the one
being filled (section 4.3).
"""

import math
from collections.abc import Callable

from bridge.types import Sampling, Ticket, Version
from configs.schema import Config
from learner.data.problems import Problem
from learner.schedule.ticket_books import TicketBooks


class AsyncWindow(TicketBooks):
    """Keeps a backlog for the actors, within the bounds on complete groups and on lag."""

    def __init__(
        self, config: Config, sampling: Sampling, next_problem: Callable[[], Problem], *, incarnation: int
    ) -> None:
        """Starts with nothing issued."""
        super().__init__(config.rounds, sampling, next_problem, incarnation=incarnation)
        self._backlog = config.rounds.groups_per_update
        self._max_complete = config.queue_groups if config.admission.when_full == "block" else None
        in_service = math.ceil(config.sequences / config.rounds.requests_per_group)
        self._max_open_when_full = config.queue_groups + in_service + self._backlog
        alpha = config.admission.async_ratio
        self._publish_every = config.publish.every_n_steps
        # The updates that tickets may be issued for ahead of the published weights: served in order, a group's lag is
        # at most that, rounded up. All that lead to the next publish have to be among them.
        ahead = [x for x in (alpha, config.rounds.max_lag_steps) if x is not None]
        self._updates_ahead = max(min(ahead), self._publish_every - 1) if ahead else None
        self._max_age = None if alpha is None else math.ceil(alpha)
        self._held_back_by: str | None = None
        self._full_at: int | None = None
        """Open tickets that stay while as many complete groups wait as may; None while they are fewer."""

    def issue(self, *, step: int, num_unclaimed: Callable[[], int] = lambda: 0) -> list[Ticket]:
        """The tickets that the backlog lacks.

        Their samples may come from any weights, but with an async ratio from ones that are at most alpha steps (rounded
        up) old when the ticket's turn comes.
        """
        num_lacking = self._backlog - num_unclaimed()
        tickets: list[Ticket] = []
        reason = None
        while len(tickets) < num_lacking and (reason := self._bound(step)) is None:
            tickets.append(self._next_ticket(step))
        if reason is not None and reason != self._held_back_by:
            self.num_held_back[reason] += 1
        self._held_back_by = reason
        return tickets

    def top_up(self, *, step: int, num_unclaimed: Callable[[], int]) -> list[Ticket]:
        """The tickets that the backlog lacks: a window is filled while the learner waits and computes, too."""
        return self.issue(step=step, num_unclaimed=num_unclaimed)

    def issue_up_to(self, order: int, *, step: int) -> list[Ticket]:
        """Issues until `order` exists."""
        return [self._next_ticket(step) for _ in range(self._num_issued, order + 1)]

    def _next_ticket(self, step: int) -> Ticket:
        return self._make_ticket(
            self._next_problem(),
            round=self._num_issued // self._rounds.groups_per_round,
            num_requests=self._rounds.requests_per_group,
            min_version=Version(incarnation=self._incarnation, step=self._earliest_step(step)),
        )

    def _bound(self, step: int) -> str | None:
        """What forbids the next order now."""
        if self._is_full():
            return "queue"
        ahead, per_update = self._updates_ahead, self._rounds.groups_per_update
        if ahead is not None and self._num_issued + 1 > (self._published(step) + 1 + ahead) * per_update:
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
        """The oldest weights that the next order may begin on; never ones that are not published yet."""
        if self._max_age is None:
            return 0
        update = self._num_issued // self._rounds.groups_per_update
        return max(0, min(update - self._max_age, self._published(step)))

    def _published(self, step: int) -> int:
        """The step of the weights that samples begin on now."""
        return step - step % self._publish_every
