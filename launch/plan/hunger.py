"""Which simulated actor gets the next ticket: of those with room, the one that holds the fewest."""

import heapq

from launch.plan.groups import SimActor
from launch.plan.pool import TicketPool


class Hunger:
    """Actors that have room for more tickets than they last found or asked for, by those they hold."""

    def __init__(self, pool: TicketPool) -> None:
        """Nobody is hungry."""
        self._pool = pool
        self._queue: list[tuple[int, int, SimActor]] = []
        """Old entries are void."""

    def note(self, actor: SimActor) -> None:
        """It has room for more than it found."""
        entry = (self._pool.num_held(actor.index), actor.index, actor)
        if actor.hunger != entry[0]:
            actor.hunger = entry[0]
            heapq.heappush(self._queue, entry)

    def next(self) -> SimActor | None:
        """An actor that gets something from the pool."""
        while self._queue and self._pool.has_offer:
            num_held, _, actor = self._queue[0]
            is_current = num_held == actor.hunger and num_held == self._pool.num_held(actor.index)
            if is_current and self._pool.share_of(actor.index) == 0:
                return None  # it holds the fewest, so whoever has room has its part
            heapq.heappop(self._queue)
            if num_held == actor.hunger:
                actor.hunger = -1
                return actor
        return None
