"""Store in virtual time: tickets that any engine may claim, lowest order first.

It follows the rules of `bridge/store/claim.py` with lists instead of queries. Under a frontier (RolloutPipe eq. 5-6),
at most `width` groups are in service over all engines. Several engines share the available tickets fairly.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from bridge.rollout_types import Ticket
from bridge.store import claim as store_claim


class TicketPool:
    """Tickets that are issued and not yet served."""

    def __init__(
        self,
        *,
        num_engines: int,
        width: int | None,
        by_sample: bool,
        shares: bool = True,
        places: Sequence[int] | None = None,
    ) -> None:
        """Starts without tickets.

        Args:
          width: frontier width in groups; None means no frontier.
          by_sample: True to split tickets into single requests.
          shares: True to limit each engine to its fair share.
          places: capacity of each engine in sequences; None means equal capacities.
        """
        self.num_engines = num_engines
        self._places = list(places or [1] * num_engines)
        self._width, self._by_sample, self._shares = width, by_sample, shares
        self.num_open = 0
        """Number of unclaimed tickets or single requests."""
        self._open: dict[int, dict[str, Ticket]] = {}
        """Unclaimed tickets by order."""
        self._open_orders: list[int] = []
        """Sorted keys of `_open`."""
        self._unserved: dict[int, int] = {}
        """Number of open and leased tickets by order."""
        self._unserved_orders: list[int] = []
        """Sorted keys of `_unserved`."""
        self._order: dict[str, int] = {}
        """Order of each unserved ticket."""
        self._owner: dict[str, int] = {}
        """Engine of each leased ticket."""
        self._in_service: dict[int, int] = {}
        """Number of leased tickets by order."""
        self._held: list[dict[int, int]] = [{} for _ in range(num_engines)]
        """Number of leased tickets by order, per engine."""
        self._num_held = [0] * num_engines
        self._frontier: tuple[int, float] | None = None
        """Cached result of `_to_serve`; None after a change."""

    @property
    def has_offer(self) -> bool:
        """True if a claim might succeed."""
        if self._width is None or len(self._in_service) < self._width:
            return bool(self._open)
        return not self._in_service.keys().isdisjoint(self._open)

    def put(self, ticket: Ticket, *, num_requests: int | None = None) -> None:
        """Issues a ticket, or `num_requests` of its requests."""
        for part in self._parts_of(ticket, num_requests):
            self.num_open += 1
            order = self._order[part.id] = part.order
            if order not in self._open:
                self._open[order] = {}
                bisect.insort(self._open_orders, order)
            self._open[order][part.id] = part
            if order not in self._unserved:
                bisect.insort(self._unserved_orders, order)
            _add(self._unserved, order, 1)
        self._frontier = None

    def part_ids(self, ticket: Ticket) -> list[str]:
        """Returns the ids under which a ticket is claimed: its own, or one per request if they are separate."""
        return [f"{ticket.id}#{i}" for i in range(ticket.num_requests)] if self._by_sample else [ticket.id]

    def _parts_of(self, ticket: Ticket, num_requests: int | None) -> list[Ticket]:
        if not self._by_sample:
            return [ticket]
        ids = self.part_ids(ticket)[:num_requests]
        return [dataclasses.replace(ticket, id=i, num_samples=1, num_requests=1) for i in ids]

    def claim(self, engine: int, limit: int, part: int | None = None) -> list[Ticket]:
        """Claims up to `limit` tickets for an engine, at most `part` per order before more of the same order."""
        offers: Iterable[store_claim.Offer] = (
            store_claim.Offer(i, order, True) for order in self._orders_on_offer() for i in self._open[order]
        )
        if part is not None:
            num_groups = limit if self._width is None else None
            offers = store_claim.spread(offers, part=part, held=self._held[engine], num_groups=num_groups)
        limit = min(limit, self.share_of(engine))
        ids = store_claim.choose(offers, limit=limit, width=self._width, in_service=self._in_service)
        return sorted((self._take(engine, id_) for id_ in ids), key=lambda ticket: ticket.order)

    def _take(self, engine: int, id_: str) -> Ticket:
        order = self._order[id_]
        ticket = self._withdraw_offer(id_, order)
        assert ticket is not None
        self._owner[id_] = engine
        self._num_held[engine] += 1
        _add(self._in_service, order, 1)
        _add(self._held[engine], order, 1)
        return ticket

    def end(self, ticket_id: str) -> int | None:
        """Removes a served or withdrawn ticket; returns the engine that leased it, if any."""
        order = self._order.pop(ticket_id, None)
        if order is None:
            return None
        self._withdraw_offer(ticket_id, order)
        _add(self._unserved, order, -1)
        if order not in self._unserved:
            _remove(self._unserved_orders, order)
        self._frontier = None
        engine = self._owner.pop(ticket_id, None)
        if engine is not None:
            self._num_held[engine] -= 1
            _add(self._in_service, order, -1)
            _add(self._held[engine], order, -1)
        return engine

    def owner(self, ticket_id: str) -> int:
        """Returns the engine that leased a ticket."""
        return self._owner[ticket_id]

    def num_held(self, engine: int) -> int:
        """Returns the number of tickets leased by an engine."""
        return self._num_held[engine]

    def share_of(self, engine: int) -> int:
        """Returns how many more tickets an engine may claim for a fair share (`bridge/store/claim.py`)."""
        if self.num_engines < 2 or not self._shares:
            return len(self._order)  # no bound, as in the store
        total, last = self._to_serve()
        # Tickets of higher orders, claimed before lower ones were issued, are outside the frontier.
        mine = sum(num for order, num in self._held[engine].items() if order <= last)
        all_places = sum(self._places[: self.num_engines])
        places = self._places[engine]
        return store_claim.fair_share(total, mine=mine, among=self.num_engines, places=places, all_places=all_places)

    def _to_serve(self) -> tuple[int, float]:
        """Returns (number of tickets to serve now, highest order among them), for all tickets or the frontier's."""
        if self._width is None:
            return len(self._order), float("inf")
        if self._frontier is None:
            orders = self._unserved_orders[: self._width]
            self._frontier = (sum(self._unserved[o] for o in orders), orders[-1] if orders else -1)
        return self._frontier

    def _orders_on_offer(self) -> Iterator[int]:
        if self._width is None:
            return iter(self._open_orders)
        begun = self._in_service.keys() & self._open.keys()
        num_free = max(0, self._width - len(self._in_service))
        new = itertools.islice((o for o in self._open_orders if o not in self._in_service), num_free)
        return iter(sorted([*begun, *new]))

    def _withdraw_offer(self, id_: str, order: int) -> Ticket | None:
        ticket = self._open.get(order, {}).pop(id_, None)
        self.num_open -= ticket is not None
        if ticket is not None and not self._open[order]:
            del self._open[order]
            _remove(self._open_orders, order)
        return ticket


def _add(counts: dict[int, int], key: int, num: int) -> None:
    """Adds to a count; removes the key at 0."""
    counts[key] = counts.get(key, 0) + num
    if not counts[key]:
        del counts[key]


def _remove(orders: list[int], order: int) -> None:
    del orders[bisect.bisect_left(orders, order)]


def group_id(ticket_id: str) -> str:
    """Returns the id of the ticket from which a single-request ticket was split, or the id itself."""
    return ticket_id.partition("#")[0]
