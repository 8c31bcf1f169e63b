"""Time as one who watches others may count it: while he watched."""

import time
from collections.abc import Callable

MAX_LOOK_S = 1.0
"""The time between two looks counts as no more than this."""


class WatchedTime:
    """Seconds for which somebody has watched.

    While the watcher is stopped himself, the machine is suspended or the clock is set, nobody watches, and what did not
    change meanwhile is no sign of anything.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_look_s: float = MAX_LOOK_S,
        before: tuple[float, float] | None = None,
    ) -> None:
        """Starts at 0, or goes on from the `state` of one before, of the same clock."""
        self._clock = clock
        self._max_look_s = max_look_s
        self._last_s, self._watched_s = before or (clock(), 0.0)

    @property
    def state(self) -> tuple[float, float]:
        """When it last looked, by its clock, and what the time was then."""
        return self._last_s, self._watched_s

    def look(self) -> float:
        """The time at this look, in seconds; look more often than every `max_look_s`."""
        now_s = self._clock()
        self._watched_s += min(max(0.0, now_s - self._last_s), self._max_look_s)
        self._last_s = now_s
        return self._watched_s
