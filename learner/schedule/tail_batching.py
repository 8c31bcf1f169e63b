"""Tail batching (RollPacker section 3): short rounds race, and their losers' prompts make long rounds. Pure.

A short round issues eta_P R prompts and closes when R groups have arrived; the losers' prompts go to the long-prompt
queue, first in, first out. A round that starts with R prompts in there is a long one: it takes the oldest R and no
others, and nobody races. In a window heats of U groups are what rounds are here (`heats.py`).
"""

import collections
from collections.abc import Iterable, Set

from bridge.types import Ticket


class LongPromptQueue:
    """Prompts that lost a race and wait for a long round; as tickets of the rounds they lost."""

    def __init__(self, groups_per_round: int) -> None:
        """Empty; `groups_per_round` is R, in a window U."""
        self._groups_per_round = groups_per_round
        self._tickets: collections.deque[Ticket] = collections.deque()

    @property
    def tickets(self) -> list[Ticket]:
        """The oldest first."""
        return list(self._tickets)

    @property
    def fills_a_round(self) -> bool:
        """Whether the next round is a long one."""
        return len(self._tickets) >= self._groups_per_round

    def defer(self, losers: Iterable[Ticket]) -> None:
        """Takes a race's losers in."""
        self._tickets.extend(losers)

    def take_round(self) -> list[Ticket]:
        """The prompts of a long round: the oldest R."""
        return [self.take() for _ in range(self._groups_per_round)]

    def take(self) -> Ticket:
        """The oldest prompt."""
        return self._tickets.popleft()


def losers(open_tickets: Iterable[Ticket], arrived: Set[str], *, num_left_in_round: int) -> list[Ticket]:
    """The tickets that lost their round's race: R groups have arrived without them. None while the race is open.

    Args:
      open_tickets: issued and not trained.
      arrived: those of them whose complete group is here.
      num_left_in_round: groups that the round still wants, the arrived ones among them.
    """
    if len(arrived) < num_left_in_round:
        return []
    return [t for t in open_tickets if t.id not in arrived]
