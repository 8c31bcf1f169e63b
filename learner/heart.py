"""The learner's signs of life, and its ear for being told to stop."""

import os
import threading
import time

from absl import logging

from bridge.store.protocol import LearnerStore
from bridge.types import Heartbeat

HEARTBEAT_S = 2.0
NO_ACTOR_WARNING_S = 60.0


class Stopped(Exception):  # noqa: N818  # nothing went wrong
    """The process was asked to end; what is in the last checkpoint and the store is enough to go on."""


class Heart:
    """Says that the learner lives, from a thread of its own, and tells it when to stop."""

    def __init__(self, store: LearnerStore, stop: threading.Event) -> None:
        """Not beating yet."""
        self._store = store
        self._stop = stop
        self._thread_stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._warned_s = time.monotonic()

    def start(self) -> None:
        """Starts beating."""
        self._thread.start()

    def stop(self) -> None:
        """Beats a last time and ends."""
        self._thread_stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Called wherever the learner waits.

        Raises:
          Stopped: the process was asked to end.
        """
        if self._stop.is_set():
            raise Stopped
        now = time.monotonic()
        if now - self._warned_s > NO_ACTOR_WARNING_S:
            self._warned_s = now
            alive = [b.process for b in self._store.heartbeats() if b.role == "actor" and is_fresh(b)]
            if not alive:
                logging.warning("no live actor; start one with: python -m launch.actor --run_dir=...")

    def _beat(self) -> None:
        while True:
            self._store.heartbeat(Heartbeat(process="learner", role="learner", pid=os.getpid(), time_s=time.time()))
            if self._thread_stop.wait(HEARTBEAT_S):
                return


def is_fresh(beat: Heartbeat) -> bool:
    """Whether its process most likely lives."""
    return time.time() - beat.time_s < 5 * HEARTBEAT_S
