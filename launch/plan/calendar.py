"""Virtual time: what happens when, the earliest first."""

import heapq
from collections.abc import Callable
from typing import Any


class Calendar:
    """Events in order of time; those of one time in order of entry."""

    def __init__(self) -> None:
        """Empty, at 0 s."""
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Has `call(*args)` made at `time_s`, or now if that is past."""
        self._num += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num, call, args))

    def step(self) -> bool:
        """Makes the next call; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, call, args = heapq.heappop(self._events)
        call(*args)
        return True
