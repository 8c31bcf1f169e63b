"""The store's part in virtual time: the tickets that any engine may claim, the lowest order first.

What `bridge/sqlite_store.py` does with a query, here with a heap: under a frontier (RolloutPipe eq. 5-6) `width`
groups at most are in service on all engines together; several engines take their part of what is there, and no more.
"""

import dataclasses
import heapq

from bridge.types import Ticket


class TicketPool:
    """Tickets offered and not yet served."""

    def __init__(self, *, num_engines: int, width: int | None, by_sample: bool) -> None:
        """`width` is the frontier's, in groups, None without one; `by_sample` splits tickets into single requests."""
        self._num_engines, self._width, self._by_sample = num_engines, width, by_sample
        self._offers: list[tuple[int, int, Ticket]] = []
        self._open: set[str] = set()
        self._owner: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._num_in_service_of_order: dict[int, int] = {}
        self._num_held = [0] * num_engines
        self._parts = 1

    @property
    def has_offer(self) -> bool:
        """Whether a claim might get something."""
        self._skip_withdrawn()
        if not self._offers:
            return False
        order = self._offers[0][0]
        return self._width is None or order in self._num_in_service_of_order or self._has_slot()

    def put(self, ticket: Ticket) -> None:
        """Offers a ticket."""
        parts = self._parts_of(ticket)
        self._parts = len(parts)
        for index, part in enumerate(parts):
            heapq.heappush(self._offers, (part.order, index, part))
            self._open.add(part.id)

    def part_ids(self, ticket: Ticket) -> list[str]:
        """Ids that a ticket is claimed under: its own, or one a request where those may go to different engines."""
        return [f"{ticket.id}#{i}" for i in range(ticket.num_requests)] if self._by_sample else [ticket.id]

    def _parts_of(self, ticket: Ticket) -> list[Ticket]:
        if not self._by_sample:
            return [ticket]
        return [dataclasses.replace(ticket, id=i, num_samples=1, num_requests=1) for i in self.part_ids(ticket)]

    def claim(self, engine: int, limit: int) -> list[Ticket]:
        """Up to `limit` tickets for an engine."""
        limit = min(limit, self.share_of(engine))
        claimed = []
        while len(claimed) < limit and self.has_offer:
            order, _, ticket = heapq.heappop(self._offers)
            self._open.remove(ticket.id)
            self._owner[ticket.id], self._order[ticket.id] = engine, order
            self._num_held[engine] += 1
            self._num_in_service_of_order[order] = self._num_in_service_of_order.get(order, 0) + 1
            claimed.append(ticket)
        return claimed

    def end(self, ticket_id: str) -> int | None:
        """A ticket is served, or withdrawn; returns the engine that had claimed it, if one had."""
        self._open.discard(ticket_id)
        if ticket_id not in self._owner:
            return None
        engine = self._owner.pop(ticket_id)
        self._num_held[engine] -= 1
        order = self._order.pop(ticket_id)
        self._num_in_service_of_order[order] -= 1
        if not self._num_in_service_of_order[order]:
            del self._num_in_service_of_order[order]
        return engine

    def num_held(self, engine: int) -> int:
        """Tickets that an engine has claimed and not yet served."""
        return self._num_held[engine]

    def share_of(self, engine: int) -> int:
        """How many more this engine may take for each to have its part (`bridge/claims.py`)."""
        total = len(self._open) + len(self._owner)
        if self._width is not None:
            total = min(total, self._width * self._parts)
        return max(0, -(-total // self._num_engines) - self._num_held[engine])

    def _has_slot(self) -> bool:
        return self._width is None or len(self._num_in_service_of_order) < self._width

    def _skip_withdrawn(self) -> None:
        while self._offers and self._offers[0][2].id not in self._open:
            heapq.heappop(self._offers)


def group_id(ticket_id: str) -> str:
    """The id of the ticket that a single request's was split from, or its own."""
    return ticket_id.partition("#")[0]
