"""Liveness rules over heartbeats; SIGSTOPped processes.

An actor notices a dead engine at once, whatever it does with it just then: starting it, sampling, swapping weights.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection

from absl import logging

from bridge.liveness import MAX_LOOK_S, Activity, LivenessSample, WatchedTime
from launch.supervision.process_tree import kill_below, stopped_below


class SigstopWatchdog:
    """Which processes have been stopped for longer than a bound."""

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """None was seen yet."""
        self._bound_s = bound_s
        self._time = WatchedTime(clock)
        self._since_s: dict[int, float] = {}

    def look(self, stopped: Collection[int]) -> set[int]:
        """Of the processes stopped now, those that have been for longer."""
        now_s = self._time.look()
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in stopped}
        return {pid for pid, since_s in self._since_s.items() if now_s - since_s > self._bound_s}


def end_stopped_processes(bound_s: float) -> list[str]:
    """From here on, kills what is below this process and was stopped for longer; in a thread.

    Returns what it did, in a list that grows with it.
    """
    done: list[str] = []
    threading.Thread(target=_watch, args=(bound_s, done), name="stopped", daemon=True).start()
    return done


def _watch(bound_s: float, done: list[str]) -> None:
    stopped = SigstopWatchdog(bound_s)
    while True:
        for pid in stopped.look(stopped_below(os.getpid())):
            done.append(f"process {pid} below this one was stopped for {bound_s:g} s and is killed")
            logging.error(done[-1])
            kill_below(pid, os.getpid())
        time.sleep(MAX_LOOK_S / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangTimeouts:
    """How long a process may be silent, in seconds."""

    first_heartbeat_timeout_s: float
    """Until its first beat: the interpreter starts."""
    heartbeat_timeout_s: float
    """Between beats: longer than that, it is stopped or dead in all its threads."""
    start_timeout_s: float
    """Between two parts of the work while it starts."""
    progress_timeout_s: float
    """Between two parts of the work after that."""

    def flags(self) -> list[str]:
        """Those of `launch.supervision.kubernetes_probe`."""
        return [f"--{name}={value:g}" for name, value in dataclasses.asdict(self).items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangDetectorState:
    """What a watcher remembers of a process between two looks; numbers only, so that it can be written down."""

    looked_at_s: float
    """By the clock, which must be the same one at the next look."""
    watched_s: float
    num_beats: int
    num_works: int
    beat_at_s: float
    """Watched time of the last change of each."""
    work_at_s: float


class HangDetector:
    """Watches one process, from its start on."""

    def __init__(
        self,
        bounds: HangTimeouts,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_look_s: float = MAX_LOOK_S,
        memory: HangDetectorState | None = None,
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
        self._sign = LivenessSample(0, 0, Activity.STARTING)
        self._beat_at_s = self._work_at_s = 0.0
        if memory is not None:
            self._time = WatchedTime(clock, max_look_s=max_look_s, before=(memory.looked_at_s, memory.watched_s))
            self._sign = LivenessSample(memory.num_beats, memory.num_works, Activity.STARTING)
            self._beat_at_s, self._work_at_s = memory.beat_at_s, memory.work_at_s

    @property
    def memory(self) -> HangDetectorState:
        """For who goes on with this vigil."""
        looked_at_s, watched_s = self._time.state
        return HangDetectorState(
            looked_at_s=looked_at_s,
            watched_s=watched_s,
            num_beats=self._sign.num_beats,
            num_works=self._sign.num_works,
            beat_at_s=self._beat_at_s,
            work_at_s=self._work_at_s,
        )

    def look(self, sign: LivenessSample) -> str | None:
        """What shows that the process hangs; None while nothing does."""
        now_s = self._time.look()
        if sign.num_beats != self._sign.num_beats:
            self._beat_at_s = now_s
        if sign.num_works != self._sign.num_works:
            self._work_at_s = now_s
        self._sign = sign
        bounds = self._bounds
        if sign.num_beats == 0:
            return _over(now_s - self._beat_at_s, bounds.first_heartbeat_timeout_s, "no first heartbeat")
        is_starting = sign.activity is Activity.STARTING
        return _over(now_s - self._beat_at_s, bounds.heartbeat_timeout_s, "no heartbeat") or _over(
            now_s - self._work_at_s,
            bounds.start_timeout_s if is_starting else bounds.progress_timeout_s,
            "no progress in its start" if is_starting else "no progress in its work",
        )


def _over(silent_s: float, bound_s: float, what: str) -> str | None:
    return f"{what} for {bound_s:g} s" if silent_s > bound_s else None
