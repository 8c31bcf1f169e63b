"""Places for episodes' processes, shared by environments: where one hangs the others go on."""

import asyncio
import collections
from collections.abc import Collection


class Places:
    """A bounded number of places; who waits is served in order, but for those whose environment may have no more.

    Of n environments each is sure of one place in 2n (of one place, if there are fewer), however long another's
    episodes hold theirs; the rest, half of them, is anybody's. A single environment has all.
    """

    def __init__(self, total: int, names: Collection[str]) -> None:
        """All are free; `names` share them, and whoever else asks."""
        self._total = total
        self._held = collections.Counter(dict.fromkeys(names, 0))
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def take(self, name: str) -> None:
        """Waits for a place of an environment."""
        self._held.setdefault(name, 0)
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((name, place))
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._waiting.remove((name, place))
            else:  # it was given one in the same moment
                self.give_back(name)
            raise

    def give_back(self, name: str) -> None:
        """Frees a place that was taken."""
        self._held[name] -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        for name, place in list(self._waiting):
            if self._has_room(name) and not place.cancelled():
                self._waiting.remove((name, place))
                self._held[name] += 1
                place.set_result(None)

    def _has_room(self, name: str) -> bool:
        num = len(self._held)
        sure = max(1, self._total // (2 * num)) if num <= self._total else 0
        kept = sum(max(0, sure - held) for other, held in self._held.items() if other != name)
        return self._total - self._held.total() > kept
