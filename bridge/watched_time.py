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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts at 0."""
        self._clock = clock
        self._last_s = clock()
        self._watched_s = 0.0

    def look(self) -> float:
        """The time at this look, in seconds; look more often than every `MAX_LOOK_S`."""
        now_s = self._clock()
        self._watched_s += min(max(0.0, now_s - self._last_s), MAX_LOOK_S)
        self._last_s = now_s
        return self._watched_s
