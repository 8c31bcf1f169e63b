"""Hang detection by liveness beacons, and detection of SIGSTOPped processes.

Hang detection does not cover a dead engine, which its actor notices immediately in every state.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection

from absl import logging

from bridge.liveness import MAX_LOOK_S, Activity, LivenessSample, WatchedTime, watched_s
from launch.supervision.process_tree import kill_below, stopped_below


class SigstopWatchdog:
    """Detector of processes suspended for longer than a timeout."""

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound_s = bound_s
        self._time = WatchedTime(clock)
        self._since_s: dict[int, float] = {}

    def look(self, stopped: Collection[int]) -> set[int]:
        """Returns the processes of `stopped` that were suspended for longer than the timeout."""
        now_s = self._time.look()
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in stopped}
        return {pid for pid, since_s in self._since_s.items() if now_s - since_s > self._bound_s}


def end_stopped_processes(bound_s: float) -> list[str]:
    """Starts a thread that kills descendants suspended for over `bound_s`; returns its list of a message per kill."""
    done: list[str] = []
    threading.Thread(target=_watch, args=(bound_s, done), name="stopped", daemon=True).start()
    return done


def _watch(bound_s: float, done: list[str]) -> None:
    stopped = SigstopWatchdog(bound_s)
    while True:
        for pid in stopped.look(stopped_below(os.getpid())):
            done.append(f"killed child process {pid}: suspended for more than {bound_s:g} s")
            logging.error(done[-1])
            kill_below(pid, os.getpid())
        time.sleep(MAX_LOOK_S / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangTimeouts:
    """Maximum silence of a process in each phase, in seconds."""

    first_heartbeat_timeout_s: float
    """Timeout for the first heartbeat, which includes the interpreter's start."""
    heartbeat_timeout_s: float
    """Maximum time between heartbeats; a longer gap means that all threads are suspended or dead."""
    start_timeout_s: float
    """Maximum time between progress reports during startup."""
    progress_timeout_s: float
    """Maximum time between progress reports after startup."""

    def flags(self) -> list[str]:
        """Returns the flags of `launch.supervision.kubernetes_probe`."""
        return [f"--{name}={value:g}" for name, value in dataclasses.asdict(self).items()]


@dataclasses.dataclass(kw_only=True)
class HangDetectorState:
    """State of a hang detector between two checks; JSON-serializable numbers only."""

    looked_at_s: float
    """Time of the last check, on a clock that the next check must share."""
    watched_s: float = 0.0
    """Watched time (`bridge.liveness.WatchedTime`) at the last check."""
    num_beats: int = 0
    num_works: int = 0
    beat_at_s: float = 0.0
    """Watched time of the last heartbeat; `work_at_s` is that of the last progress report."""
    work_at_s: float = 0.0


class HangDetector:
    """Hang detector of one process."""

    def __init__(
        self,
        bounds: HangTimeouts,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_look_s: float = MAX_LOOK_S,
        memory: HangDetectorState | None = None,
    ) -> None:
        """Begins with a new process, or with the state in `memory`; at most `max_look_s` counts between two checks."""
        self._bounds, self._clock, self._max_look_s = bounds, clock, max_look_s
        self.memory = memory or HangDetectorState(looked_at_s=clock())

    def look(self, sign: LivenessSample) -> str | None:
        """Returns the evidence that the process hangs; None if it does not."""
        seen, now_s = self.memory, self._clock()
        seen.watched_s += watched_s(seen.looked_at_s, now_s, most_s=self._max_look_s)
        seen.looked_at_s = now_s
        if sign.num_beats != seen.num_beats:
            seen.num_beats, seen.beat_at_s = sign.num_beats, seen.watched_s
        if sign.num_works != seen.num_works:
            seen.num_works, seen.work_at_s = sign.num_works, seen.watched_s
        bounds = self._bounds
        if sign.num_beats == 0:
            return _over(seen.watched_s - seen.beat_at_s, bounds.first_heartbeat_timeout_s, "no first heartbeat")
        is_starting = sign.activity is Activity.STARTING
        return _over(seen.watched_s - seen.beat_at_s, bounds.heartbeat_timeout_s, "no heartbeat") or _over(
            seen.watched_s - seen.work_at_s,
            bounds.start_timeout_s if is_starting else bounds.progress_timeout_s,
            "no progress during startup" if is_starting else "no progress",
        )


def _over(silent_s: float, bound_s: float, what: str) -> str | None:
    return f"{what} for {bound_s:g} s" if silent_s > bound_s else None
