"""Whether a process hangs, judged by what was seen to change in time that was really watched."""

import dataclasses
import time
from collections.abc import Callable

from bridge.pulse import Doing, Sign
from bridge.watched_time import MAX_LOOK_S, WatchedTime


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What a watcher remembers of a process between two looks; numbers only, so that it can be written down."""

    looked_at_s: float
    """By the clock, which must be the same one at the next look."""
    watched_s: float
    num_beats: int
    num_works: int
    beat_at_s: float
    """Watched time of the last change of each."""
    work_at_s: float


class Vigil:
    """Watches one process, from its start on."""

    def __init__(
        self,
        bounds: Bounds,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_look_s: float = MAX_LOOK_S,
        memory: Memory | None = None,
    ) -> None:
        """The process was started just now, or is the one of `memory`.

        Args:
          bounds: how long it may be silent.
          clock: monotonic, in seconds.
          max_look_s: the time between two looks counts as no more than this.
          memory: of an earlier vigil over it.
        """
        self._bounds = bounds
        self._time = WatchedTime(clock, max_look_s=max_look_s)
        self._sign = Sign(0, 0, Doing.STARTING)
        self._beat_at_s = self._work_at_s = 0.0
        if memory is not None:
            self._time = WatchedTime(clock, max_look_s=max_look_s, before=(memory.looked_at_s, memory.watched_s))
            self._sign = Sign(memory.num_beats, memory.num_works, Doing.STARTING)
            self._beat_at_s, self._work_at_s = memory.beat_at_s, memory.work_at_s

    @property
    def memory(self) -> Memory:
        """For who goes on with this vigil."""
        looked_at_s, watched_s = self._time.state
        return Memory(
            looked_at_s=looked_at_s,
            watched_s=watched_s,
            num_beats=self._sign.num_beats,
            num_works=self._sign.num_works,
            beat_at_s=self._beat_at_s,
            work_at_s=self._work_at_s,
        )

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
