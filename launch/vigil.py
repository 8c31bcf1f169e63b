"""Whether a process hangs, judged by what was seen to change in time that was really watched."""

import dataclasses
import time
from collections.abc import Callable

from bridge.pulse import Doing, Sign
from bridge.watched_time import WatchedTime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long a process may be silent, in seconds."""

    first_beat_s: float
    """Until its first beat: the interpreter starts."""
    beat_s: float
    """Between beats: longer than that, it is stopped or dead in all its threads."""
    start_s: float
    """Between two parts of the work while it starts."""
    work_s: float
    """Between two parts of the work after that."""


class Vigil:
    """Watches one process, from its start on."""

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        """The process was started just now."""
        self._bounds = bounds
        self._time = WatchedTime(clock)
        self._sign = Sign(0, 0, Doing.STARTING)
        self._beat_at_s = self._work_at_s = 0.0

    def look(self, sign: Sign) -> str | None:
        """What shows that the process hangs; None while nothing does."""
        now_s = self._time.look()
        if sign.num_beats != self._sign.num_beats:
            self._beat_at_s = now_s
        if sign.num_works != self._sign.num_works:
            self._work_at_s = now_s
        self._sign = sign
        bounds = self._bounds
        if sign.num_beats == 0:
            return _over(now_s - self._beat_at_s, bounds.first_beat_s, "no first heartbeat")
        is_starting = sign.doing is Doing.STARTING
        return _over(now_s - self._beat_at_s, bounds.beat_s, "no heartbeat") or _over(
            now_s - self._work_at_s,
            bounds.start_s if is_starting else bounds.work_s,
            "no progress in its start" if is_starting else "no progress in its work",
        )


def _over(silent_s: float, bound_s: float, what: str) -> str | None:
    return f"{what} for {bound_s:g} s" if silent_s > bound_s else None
