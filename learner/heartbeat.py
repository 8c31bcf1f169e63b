"""The learner's signs of life, its lead of the run, and its ear for being told to stop."""

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
"""How often the learner asks whether another of its processes was told to stop."""
LAST_BEAT_S = 10.0
"""How long the last one may take at the end: the store may be away."""
ACTORS_CHECK_S = 10.0
"""How often, while it waits, the learner looks whether an actor lives."""
NO_ACTOR_WARNING_S = 60.0


class Stopped(Exception):  # noqa: N818  # nothing went wrong
    """The process was asked to end; what is in the last checkpoint and the store is enough to go on."""


class LearnerHeartbeat:
    """Says that the learner lives, from threads of its own, and how far it is; tells it when to stop."""

    def __init__(
        self,
        store: LearnerStore,
        stop: threading.Event,
        liveness: Liveness,
        *,
        leader_lease_s: float,
        hosts: Processes | None = None,
        say_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Not beating yet.

        Args:
          store: where it beats.
          stop: set when this process is asked to end.
          liveness: felt by who started this process.
          leader_lease_s: `store.leader_lease_s`.
          hosts: the learner's processes, each of which may be asked to end; this one alone if not given.
          say_alive: called wherever the learner waits; tells the others.
        """
        self._hosts, self._say_alive = hosts or SingleProcess(), say_alive
        self._store = store
        self._stop = stop
        self._liveness = liveness
        self._lead_s = leader_lease_s
        self._failure: Exception | None = None
        self._thread_stop = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        # Apart: while the store is away a beat waits for it, and who is asked to end must be heard all the same.
        self._stop_listener = threading.Thread(target=self._listen_for_stop, name="ear", daemon=True)
        self._checked_s = self._warned_s = time.monotonic()
        self._has_no_actors = False
        self._has_updated = False

    def start(self) -> None:
        """Starts beating, and listening to the other processes."""
        self._thread.start()
        self._stop_listener.start()

    def stop(self) -> None:
        """Beats a last time and ends; more than once is fine."""
        self._thread_stop.set()
        for thread in (self._thread, self._stop_listener):
            if thread.ident is not None:
                thread.join(LAST_BEAT_S)

    def check(self) -> None:
        """Called wherever the learner waits for others.

        Raises:
          Stopped: a process of the learner was asked to end.
          ProcessLostError: the learner's other processes can't be reached.
          SupersededLearnerError: another learner leads the run.
          StoreLostError: the store was away for too long.
        """
        if self._stop.is_set():
            raise Stopped
        if self._failure is not None:
            raise self._failure
        self._say_alive()
        self._look_for_actors()
        self._liveness.report(Activity.NO_ACTORS if self._has_no_actors else Activity.WAITING)

    def report_progress(self) -> None:
        """Called wherever a part of the learner's work is done, and wherever a wait is over before more work begins.

        Up to the first update the next part may have to compile, which takes longer than work does.
        """
        self._liveness.report(Activity.WORKING if self._has_updated else Activity.STARTING)

    def updated(self) -> None:
        """Called after each update.

        Raises:
          What `check` does.
        """
        self._has_updated = True
        self.check()
        self.report_progress()

    def _look_for_actors(self) -> None:
        now = time.monotonic()
        if now - self._checked_s < ACTORS_CHECK_S:
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
            except Exception as e:  # raised where the learner next looks
                self._failure = e
                return
            if self._thread_stop.wait(min(HEARTBEAT_S, self._lead_s / 3)):
                return

    def _listen_for_stop(self) -> None:
        while not self._thread_stop.wait(STOP_POLL_S):
            try:
                if self._hosts.stop_requested:
                    self._stop.set()
            except Exception as e:  # raised where the learner next looks
                self._failure = e
                return


def live_actors(store: LearnerStore) -> list[Heartbeat]:
    """The last signs of life of the actors that most likely live, by the store's clock."""
    since_s = store.now_s() - 5 * HEARTBEAT_S
    return [b for b in store.heartbeats() if b.role == "actor" and b.time_s > since_s]
