"""Over-provisioning: races, losers, the long-prompt queue, capacity check.

Consecutive orders form a heat, of eta_P U tickets. The first U groups of a heat to be complete win; by the U-th the
others have lost, and their prompts wait for a heat of their own, of U tickets, in which nobody races (RollPacker's long
round). So a heat gives exactly U groups, an update's worth: heat n stands for update n, and what bounds the lag of a
window counts heats where it counted updates. With eta_P = 1 a heat is the U orders of an update, issued one by one, and
nobody loses.

A heat that races is issued whole: what its groups are compared by is how long they take, so they begin together as far
as there are places; and each that is decided leaves eta_P U - U losers, so that who waits for U of them does not wait
for ever. Why not one race over all that is open, of which the oldest lose whenever an update is full: orders of several
heats are open at once, begun at different times, and in a long heat nobody may lose, whoever is the oldest.

A short round issues eta_P R prompts and closes when R groups have arrived; the losers' prompts go to the long-prompt
queue, first in, first out. A round that starts with R prompts in there is a long one: it takes the oldest R and no
others, and nobody races. In a window heats of U groups are what rounds are here (`tail_batching.py`).
"""

import bisect
import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

from absl import logging

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Ticket
from bridge.store.sql.learner_side import LearnerStore
from bridge.store.store_types import LIVE_S
from configs.race_capacity import check_race_capacity, num_racing
from configs.schema import Config
from configs.sections import RoundsConfig


@dataclasses.dataclass(slots=True, kw_only=True)
class Race:
    """One heat's books."""

    index: int
    """The update that its groups stand for."""
    first_order: int
    size: int
    """Tickets that it is to have: eta_P U, or U if it is long."""
    is_long: bool
    """Whether its prompts are those of the long-prompt queue."""
    num_issued: int = 0
    num_lost: int = 0
    num_consumed: int = 0

    @property
    def is_full(self) -> bool:
        """Whether it takes no further order."""
        return self.num_issued == self.size

    @property
    def is_over(self) -> bool:
        """Whether all its groups are trained."""
        return self.is_full and self.num_consumed + self.num_lost == self.num_issued

    def has(self, order: int) -> bool:
        """Whether an order is one of its."""
        return self.first_order <= order < self.first_order + self.num_issued


class Races:
    """The heats that are not over, the one being issued among them."""

    def __init__(self, rounds: RoundsConfig) -> None:
        """Before the first order."""
        self._num_winners = rounds.groups_per_update
        self._size = rounds.groups_per_race
        self._races: list[Race] = []
        self._num_opened = 0

    @property
    def next_index(self) -> int:
        """The heat of the next order."""
        return self._num_opened if self.is_between else self._num_opened - 1

    @property
    def has_losers(self) -> bool:
        """Whether there are more of a heat than win."""
        return self._size > self._num_winners

    @property
    def is_between(self) -> bool:
        """Whether the next order begins a heat."""
        return not self._races or self._races[-1].index != self._num_opened - 1 or self._races[-1].is_full

    @property
    def num_wanted(self) -> int:
        """Groups that are trained by the end of all that is issued next: a whole heat's if it races, else one."""
        place = 0 if self.is_between else self._races[-1].num_issued
        return self.next_index * self._num_winners + (self._num_winners if self.has_losers else place + 1)

    def enter(self, order: int, *, is_long: bool) -> Race:
        """The heat of the next order, which is begun if none is open; `is_long` matters then alone."""
        if self.is_between:
            size = self._num_winners if is_long else self._size
            self._races.append(Race(index=self._num_opened, first_order=order, size=size, is_long=is_long))
            self._num_opened += 1
        race = self._races[-1]
        race.num_issued += 1
        return race

    def decide(self, order: int, open_tickets: Iterable[Ticket], arrived: Collection[str]) -> list[Ticket]:
        """The tickets that lose now that the group of `order` is here too; none while their race is open.

        Args:
          order: of a ticket that is open.
          open_tickets: of the heat at least.
          arrived: the ids of those whose group is here.
        """
        race = self._of(order)
        if not race.is_full or race.num_issued - race.num_lost <= self._num_winners:
            return []  # without a race, or decided
        mine = [t for t in open_tickets if race.has(t.order)]
        if race.num_consumed + sum(t.id in arrived for t in mine) < self._num_winners:
            return []
        lost = [t for t in mine if t.id not in arrived]
        race.num_lost += len(lost)
        return lost

    def wanted(self, open_tickets: Iterable[Ticket], arrived: Collection[str]) -> list[Ticket]:
        """Returns the tickets whose groups are still to come and be trained; of an open race the lowest orders.

        Args:
          open_tickets: of all heats, by order.
          arrived: the ids of those whose group is here.
        """
        num_lacking: dict[int, int] = {h.index: self._num_winners - h.num_consumed for h in self._races}
        coming: list[tuple[int, Ticket]] = []
        for ticket in open_tickets:
            index = self._of(ticket.order).index
            if ticket.id in arrived:
                num_lacking[index] -= 1
            else:
                coming.append((index, ticket))
        wanted: list[Ticket] = []
        for index, ticket in coming:
            num_lacking[index] -= 1
            if num_lacking[index] >= 0:
                wanted.append(ticket)
        return wanted

    def consume(self, order: int) -> None:
        """Books a group as trained."""
        self._of(order).num_consumed += 1

    def reopen_update(self, orders: Iterable[int]) -> None:
        """Books groups as not trained after all; their heats must not have been forgotten."""
        for order in orders:
            self._of(order).num_consumed -= 1

    def forget(self, *, keep: Collection[int]) -> None:
        """Closes the books of what is over, but for the heats of the orders in `keep`."""
        self._races = [h for h in self._races if not h.is_over or any(h.has(o) for o in keep)]

    def get_state(self) -> dict[str, Any]:
        """All of it; JSON."""
        return {"num_opened": self._num_opened, "heats": [dataclasses.asdict(h) for h in self._races]}

    def set_state(self, state: Mapping[str, Any], *, open_tickets: Iterable[Ticket]) -> None:
        """Goes to where `get_state` was called.

        Raises:
          ValueError: an open ticket is of no heat, or a heat's number of them is another.
        """
        orders = sorted(t.order for t in open_tickets)
        self._races, self._num_opened = [Race(**h) for h in state["heats"]], state["num_opened"]
        counts = [sum(h.has(o) for o in orders) for h in self._races]
        booked = [h.num_issued - h.num_lost - h.num_consumed for h in self._races]
        if counts != booked or sum(counts) != len(orders):
            raise ValueError(
                f"{len(orders)} open tickets, {counts} of them in heats that have {booked} open: the checkpoint's "
                "books don't add up"
            )

    def _of(self, order: int) -> Race:
        race = self._races[bisect.bisect_right(self._races, order, key=lambda h: h.first_order) - 1]
        if not race.has(order):
            raise ValueError(f"order {order} is of no heat that is not over")
        return race


class RaceCapacity:
    """Looks once a round, and says so when the engines are too few; once for each number of places."""

    def __init__(self, config: Config, store: LearnerStore) -> None:
        """Nothing was said yet."""
        self._config, self._store = config, store
        self._said: int | None = None

    def look(self) -> str | None:
        """What is said now, if anything. Nothing while engines start: more places are on their way."""
        if num_racing(self._config) is None:
            return None
        since_s = self._store.now_s() - LIVE_S
        live = [b for b in self._store.heartbeats() if b.role == "actor" and b.time_s > since_s]
        sizes = _places(live)
        if sizes is None or sum(sizes) == self._said:
            return None
        self._said = sum(sizes)
        shortage = check_race_capacity(
            self._config,
            num_engines=len(sizes),
            max_num_seqs=self._config.actor.max_num_seqs,
            num_sequences=sum(sizes),
        )
        if shortage is not None:
            logging.warning("%s", shortage)
        return shortage


def _places(live: list[Heartbeat]) -> list[int] | None:
    """Of each engine that serves; None if none does, or one is still starting."""
    reports = [b.report for b in live]
    serving = [r.max_sequences for r in reports if r is not None and not r.is_shutting_down]
    return None if None in reports else serving or None


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
