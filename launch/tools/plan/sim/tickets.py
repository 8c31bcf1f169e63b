"""The store's part in virtual time: the tickets that any engine may claim, the lowest order first.

What `bridge/store/open.py` does with a query, here with lists, and by the same rules
(`bridge/store/claim.py`): under a frontier (RolloutPipe eq. 5-6) `width` groups at most are in service on all
engines together; several engines take their part of what is there, and no more.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from bridge.rollout_types import Ticket
from bridge.store import claim as store_claim


class TicketPool:
    """Tickets offered and not yet served."""

    def __init__(
        self,
        *,
        num_engines: int,
        width: int | None,
        by_sample: bool,
        shares: bool = True,
        places: Sequence[int] | None = None,
    ) -> None:
        """No tickets yet.

        Args:
          num_engines: who claims.
          width: the frontier's, in groups; None without one.
          by_sample: tickets are split into single requests.
          shares: several engines take their part of what is there, and no more.
          places: sequences that each engine runs at once; None where all run as many.
        """
        self.num_engines = num_engines
        """That take their part of what is there."""
        self._places = list(places or [1] * num_engines)
        self._width, self._by_sample, self._shares = width, by_sample, shares
        self.num_open = 0
        """Tickets, or single requests, that nobody has claimed."""
        self._open: dict[int, dict[str, Ticket]] = {}
        """Tickets that nobody has claimed, by order."""
        self._open_orders: list[int] = []
        """The keys of that, rising."""
        self._unserved: dict[int, int] = {}
        """How many tickets are open or in service, by order."""
        self._unserved_orders: list[int] = []
        """The keys of that, rising."""
        self._order: dict[str, int] = {}
        """Of each unserved ticket."""
        self._owner: dict[str, int] = {}
        """The engine of each ticket in service."""
        self._in_service: dict[int, int] = {}
        """How many tickets are in service, by order."""
        self._held: list[dict[int, int]] = [{} for _ in range(num_engines)]
        """The same for each engine."""
        self._num_held = [0] * num_engines
        self._frontier: tuple[int, float] | None = None
        """What `_to_serve` found; None after a change."""

    @property
    def has_offer(self) -> bool:
        """Whether a claim might get something."""
        if self._width is None or len(self._in_service) < self._width:
            return bool(self._open)
        return not self._in_service.keys().isdisjoint(self._open)

    def put(self, ticket: Ticket, *, num_requests: int | None = None) -> None:
        """Offers a ticket, or so many of its requests."""
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
        """Ids that a ticket is claimed under: its own, or one a request where those may go to different engines."""
        return [f"{ticket.id}#{i}" for i in range(ticket.num_requests)] if self._by_sample else [ticket.id]

    def _parts_of(self, ticket: Ticket, num_requests: int | None) -> list[Ticket]:
        if not self._by_sample:
            return [ticket]
        ids = self.part_ids(ticket)[:num_requests]
        return [dataclasses.replace(ticket, id=i, num_samples=1, num_requests=1) for i in ids]

    def claim(self, engine: int, limit: int, part: int | None = None) -> list[Ticket]:
        """Up to `limit` tickets for an engine, `part` of an order before any more of it."""
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
        """A ticket is served, or withdrawn; returns the engine that had claimed it, if one had."""
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
        """The engine that has claimed a ticket in service."""
        return self._owner[ticket_id]

    def num_held(self, engine: int) -> int:
        """Tickets that an engine has claimed and not yet served."""
        return self._num_held[engine]

    def share_of(self, engine: int) -> int:
        """How many more this engine may take for each to have its part (`bridge/store/claim.py`)."""
        if self.num_engines < 2 or not self._shares:
            return len(self._order)  # no bound, as the store has none
        total, last = self._to_serve()
        # Those of higher orders, claimed before lower ones came, are not of the frontier.
        mine = sum(num for order, num in self._held[engine].items() if order <= last)
        all_places = sum(self._places[: self.num_engines])
        places = self._places[engine]
        return store_claim.fair_share(total, mine=mine, among=self.num_engines, places=places, all_places=all_places)

    def _to_serve(self) -> tuple[int, float]:
        """(tickets to be served now, the last order among them): all, or those of the frontier's groups."""
        if self._width is None:
            return len(self._order), float("inf")
        if self._frontier is None:
            orders = self._unserved_orders[: self._width]
            self._frontier = (sum(self._unserved[o] for o in orders), orders[-1] if orders else -1)
        return self._frontier

    def _orders_on_offer(self) -> Iterator[int]:
        """Orders of open tickets that may be claimed now, rising."""
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
    """Adds to a count; none of it is no key."""
    counts[key] = counts.get(key, 0) + num
    if not counts[key]:
        del counts[key]


def _remove(orders: list[int], order: int) -> None:
    del orders[bisect.bisect_left(orders, order)]


def group_id(ticket_id: str) -> str:
    """The id of the ticket that a single request's was split from, or its own."""
    return ticket_id.partition("#")[0]
