"""Ends the processes below this one that were stopped: an engine that stands still is as good as a dead one.

An actor notices a dead engine at once, whatever it does with it just then: starting it, sampling, swapping weights.
"""

import os
import threading
import time
from collections.abc import Callable, Collection

from absl import logging

from bridge.watched_time import MAX_LOOK_S, WatchedTime
from launch.processes.lifeline import kill_below, stopped_below


class StoppedProcesses:
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
    stopped = StoppedProcesses(bound_s)
    while True:
        for pid in stopped.look(stopped_below(os.getpid())):
            done.append(f"process {pid} below this one was stopped for {bound_s:g} s and is killed")
            logging.error(done[-1])
            kill_below(pid, os.getpid())
        time.sleep(MAX_LOOK_S / 2)
