"""Over-provisioning: races, losers, the long-prompt queue and the capacity check.

In a window, eta_P U consecutive orders form a race. The first U complete groups win. When the U-th arrives, the others
have lost, and their prompts wait for a long race of U tickets, in which no group loses (RollPacker's long round). Each
race thus yields exactly U groups: race n corresponds to update n, and a window's lag bound counts races. With eta_P = 1
a race is the U orders of an update, issued one by one, without losers.

A race with losers is issued as a whole, because its groups are compared by their duration, so they must start together
as far as capacity allows. One race over all open tickets would not work: they started at different times, and the
tickets of a long race must not lose.

A short round issues eta_P R prompts and closes when R groups have arrived. The losers' prompts enter the long-prompt
queue, first in, first out. A round that starts with at least R prompts in the queue is long: it takes the oldest R, and
no group loses.
"""

import bisect
import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

from absl import logging

from bridge.rollout_types import Ticket
from bridge.store.sql.learner_side import LearnerStore
from configs.race_capacity import check_race_capacity, num_racing
from configs.schema import Config
from configs.sections import RoundsConfig
from learner.schedule.served_steps import serving_engines


@dataclasses.dataclass(slots=True, kw_only=True)
class Race:
    """State of one race."""

    index: int
    """Update that the race corresponds to."""
    first_order: int
    size: int
    """Tickets of the race: eta_P U, or U for a long race."""
    is_long: bool
    """True if its prompts are from the long-prompt queue."""
    num_issued: int = 0
    num_lost: int = 0
    num_consumed: int = 0

    @property
    def is_full(self) -> bool:
        """True if all its tickets are issued."""
        return self.num_issued == self.size

    @property
    def is_over(self) -> bool:
        """True if all its groups are trained or have lost."""
        return self.is_full and self.num_consumed + self.num_lost == self.num_issued

    def has(self, order: int) -> bool:
        """Returns True if an order belongs to the race."""
        return self.first_order <= order < self.first_order + self.num_issued


class Races:
    """Races that are not over, including the one being issued."""

    def __init__(self, rounds: RoundsConfig) -> None:
        self._num_winners = rounds.groups_per_update
        self._size = rounds.groups_per_race
        self._races: list[Race] = []
        self._num_opened = 0

    @property
    def next_index(self) -> int:
        """Race of the next order."""
        return self._num_opened if self.is_between else self._num_opened - 1

    @property
    def has_losers(self) -> bool:
        """True if a race has more groups than win."""
        return self._size > self._num_winners

    @property
    def is_between(self) -> bool:
        """True if the next order starts a race."""
        return not self._races or self._races[-1].index != self._num_opened - 1 or self._races[-1].is_full

    @property
    def num_wanted(self) -> int:
        """Groups trained by the end of the next issue, which is a whole race if it has losers, else one order."""
        place = 0 if self.is_between else self._races[-1].num_issued
        return self.next_index * self._num_winners + (self._num_winners if self.has_losers else place + 1)

    def enter(self, order: int, *, is_long: bool) -> Race:
        """Returns the race of the next order, and starts it if none is open; only then `is_long` is used."""
        if self.is_between:
            size = self._num_winners if is_long else self._size
            self._races.append(Race(index=self._num_opened, first_order=order, size=size, is_long=is_long))
            self._num_opened += 1
        race = self._races[-1]
        race.num_issued += 1
        return race

    def decide(self, order: int, open_tickets: Iterable[Ticket], arrived: Collection[str]) -> list[Ticket]:
        """Returns the tickets that lose when the group of `order` arrives; none while their race is open.

        `open_tickets` holds at least all open tickets of the race.
        """
        race = self._of(order)
        if not race.is_full or race.num_issued - race.num_lost <= self._num_winners:
            return []  # without losers, or decided
        mine = [t for t in open_tickets if race.has(t.order)]
        if race.num_consumed + sum(t.id in arrived for t in mine) < self._num_winners:
            return []
        lost = [t for t in mine if t.id not in arrived]
        race.num_lost += len(lost)
        return lost

    def wanted(self, open_tickets: Iterable[Ticket], arrived: Collection[str]) -> list[Ticket]:
        """Returns the tickets whose groups are still to arrive and be trained; of an open race the lowest orders.

        `open_tickets` are those of all races, by order.
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
        """Records a group as trained."""
        self._of(order).num_consumed += 1

    def reopen_update(self, orders: Iterable[int]) -> None:
        """Records groups as not trained; their races must still be known."""
        for order in orders:
            self._of(order).num_consumed -= 1

    def forget(self, *, keep: Collection[int]) -> None:
        """Removes races that are over, except those of the orders in `keep`."""
        self._races = [h for h in self._races if not h.is_over or any(h.has(o) for o in keep)]

    def get_state(self) -> dict[str, Any]:
        """Returns the whole state; JSON."""
        return {"num_opened": self._num_opened, "heats": [dataclasses.asdict(h) for h in self._races]}

    def set_state(self, state: Mapping[str, Any], *, open_tickets: Iterable[Ticket]) -> None:
        """Restores the state that `get_state` returned; raises ValueError if it contradicts the open tickets."""
        orders = sorted(t.order for t in open_tickets)
        self._races, self._num_opened = [Race(**h) for h in state["heats"]], state["num_opened"]
        counts = [sum(h.has(o) for o in orders) for h in self._races]
        booked = [h.num_issued - h.num_lost - h.num_consumed for h in self._races]
        if counts != booked or sum(counts) != len(orders):
            raise ValueError(
                f"checkpoint: open tickets per race must be {booked}, got {counts} of {len(orders)} open tickets"
            )

    def _of(self, order: int) -> Race:
        race = self._races[bisect.bisect_right(self._races, order, key=lambda h: h.first_order) - 1]
        if not race.has(order):
            raise ValueError(f"order {order} belongs to no race in progress")
        return race


class RaceCapacity:
    """Capacity check, once per round; warns if the engines are too few, once per capacity."""

    def __init__(self, config: Config, store: LearnerStore) -> None:
        self._config, self._store = config, store
        self._said: int | None = None

    def look(self) -> str | None:
        """Returns the warning that is logged now, if any; none while engines start, since capacity may grow."""
        if num_racing(self._config) is None:
            return None
        reports = serving_engines(self._store)
        sizes = [report.max_sequences for report in reports or ()]
        if reports is None or sum(sizes) == self._said:
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


class LongPromptQueue:
    """Prompts that lost a race and wait for a long round, as tickets of the rounds they lost."""

    def __init__(self, groups_per_round: int) -> None:
        """Creates an empty queue; `groups_per_round` is R, in a window U."""
        self._groups_per_round = groups_per_round
        self._tickets: collections.deque[Ticket] = collections.deque()

    @property
    def tickets(self) -> list[Ticket]:
        """Waiting tickets, oldest first."""
        return list(self._tickets)

    @property
    def fills_a_round(self) -> bool:
        """True if the next round is a long one."""
        return len(self._tickets) >= self._groups_per_round

    def defer(self, losers: Iterable[Ticket]) -> None:
        """Appends the losers of a race."""
        self._tickets.extend(losers)

    def take_round(self) -> list[Ticket]:
        """Removes and returns the prompts of a long round: the oldest R."""
        return [self.take() for _ in range(self._groups_per_round)]

    def take(self) -> Ticket:
        """Removes and returns the oldest prompt."""
        return self._tickets.popleft()


def losers(open_tickets: Iterable[Ticket], arrived: Set[str], *, num_left_in_round: int) -> list[Ticket]:
    """Returns the tickets that lost their round's race, R groups having arrived; none while the race is open.

    `num_left_in_round` counts the groups that the round still needs, including arrived ones.
    """
    if len(arrived) < num_left_in_round:
        return []
    return [t for t in open_tickets if t.id not in arrived]
