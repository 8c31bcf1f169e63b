"""Which groups are trained next: each as it is complete, or a whole round in submission order. Pure: no jax, no clock.

Training on each complete group as it arrives is RolloutPipe's CGP (section 3.2); waiting for the round is the papers'
serial baseline.
"""

from collections.abc import Callable
from typing import Generic

from configs.schema import Config
from learner.schedule.intake import G
from learner.schedule.ticket_books import TicketBooks


class TrainingOrder(Generic[G]):
    """Hands out the groups to train next, all of one update."""

    def __init__(self, config: Config, planner: TicketBooks, take: Callable[[int], list[G]]) -> None:
        """`take` gives up to so many of the groups that wait and may be trained now (`Intake.hand_out`)."""
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
