"""Learner heartbeat: liveness, leader lease, and stop-signal listener."""

import os
import threading
import time
from collections.abc import Callable

from absl import logging

from bridge.heartbeat_types import Heartbeat
from bridge.liveness import Activity, Liveness
from bridge.store.sql.learner_side import LearnerStore
from learner.distributed.channel import Processes, SingleProcess

HEARTBEAT_S = 2.0
STOP_POLL_S = 1.0
"""Interval between checks for a stop request in another learner process, in seconds."""
LAST_BEAT_S = 10.0
"""Timeout for each thread to exit at the end, in seconds; the store may be unreachable."""
ACTORS_CHECK_S = 10.0
"""Interval between checks for live actors while the learner waits, in seconds."""
NO_ACTOR_WARNING_S = 60.0


class Stopped(Exception):  # noqa: N818  # not an error
    """Raised after a stop request; the last checkpoint and the store suffice to resume."""


class LearnerHeartbeat:
    """Heartbeats and leader lease renewal, from background threads, and the stop checks of the training loop."""

    def __init__(
        self,
        store: LearnerStore,
        stop: threading.Event,
        liveness: Liveness,
        *,
        leader_lease_s: float,
        hosts: Processes | None = None,
        say_alive: Callable[[], None] = lambda: None,
        has_actors: bool = True,
    ) -> None:
        """Prepares the threads without starting them.

        `stop` is set when any process in `hosts` is asked to stop. The parent process reads `liveness`. `say_alive`
        sends a keep-alive to the followers whenever the learner waits. Without `has_actors` no actor is missed.
        """
        self._hosts, self._say_alive = hosts or SingleProcess(), say_alive
        self._store = store
        self._stop = stop
        self._liveness = liveness
        self._lead_s = leader_lease_s
        self._failure: Exception | None = None
        self._thread_stop = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        # Separate thread: heartbeats block while the store is unreachable, but stop requests must still be handled.
        self._stop_listener = threading.Thread(target=self._listen_for_stop, name="ear", daemon=True)
        self._checked_s = self._warned_s = time.monotonic()
        self._has_actors, self._has_no_actors = has_actors, False
        self._has_updated = False

    def start(self) -> None:
        """Starts the heartbeat and the stop-signal listener."""
        self._thread.start()
        self._stop_listener.start()

    def stop(self) -> None:
        """Stops both threads; idempotent."""
        self._thread_stop.set()
        for thread in (self._thread, self._stop_listener):
            if thread.ident is not None:
                thread.join(LAST_BEAT_S)

    def check(self) -> None:
        """Checks for stop requests and failures; called whenever the learner waits.

        Raises Stopped if a learner process was asked to stop, ProcessLostError if one is unreachable,
        SupersededLearnerError if another learner holds the leader lease, and StoreLostError if the store was
        unreachable for too long.
        """
        if self._stop.is_set():
            raise Stopped
        if self._failure is not None:
            raise self._failure
        self._say_alive()
        self._look_for_actors()
        self._liveness.report(Activity.NO_ACTORS if self._has_no_actors else Activity.WAITING)

    def report_progress(self) -> None:
        """Reports progress to the hang detector, after each part of the work and after each wait.

        Reports STARTING before the first update, because the next part may have to compile.
        """
        self._liveness.report(Activity.WORKING if self._has_updated else Activity.STARTING)

    def updated(self) -> None:
        """Marks an update as complete, then checks like `check`."""
        self._has_updated = True
        self.check()
        self.report_progress()

    def _look_for_actors(self) -> None:
        now = time.monotonic()
        if not self._has_actors or now - self._checked_s < ACTORS_CHECK_S:
            return
        self._checked_s = now
        self._has_no_actors = not live_actors(self._store)
        if self._has_no_actors and now - self._warned_s > NO_ACTOR_WARNING_S:
            self._warned_s = now
            logging.warning(
                "no live actor; start one with: python -m launch.actor --run_dir=..., elsewhere --store=... --run=..."
            )

    def _send_heartbeats(self) -> None:
        while True:
            try:
                self._store.heartbeat(Heartbeat(process="learner", role="learner", pid=os.getpid(), time_s=time.time()))
                self._store.renew_leadership(lease_s=self._lead_s)
            except Exception as e:  # check() raises it
                self._failure = e
                return
            if self._thread_stop.wait(min(HEARTBEAT_S, self._lead_s / 3)):
                return

    def _listen_for_stop(self) -> None:
        while not self._thread_stop.wait(STOP_POLL_S):
            try:
                if self._hosts.stop_requested:
                    self._stop.set()
            except Exception as e:  # check() raises it
                self._failure = e
                return


def live_actors(store: LearnerStore) -> list[Heartbeat]:
    """Returns the heartbeats of actors seen in the last 5 heartbeat intervals, by the store's clock."""
    since_s = store.now_s() - 5 * HEARTBEAT_S
    return [b for b in store.heartbeats() if b.role == "actor" and b.time_s > since_s]
