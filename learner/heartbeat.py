"""The learner's signs of life, its lead of the run, and its ear for being told to stop."""

import os
import threading
import time
from collections.abc import Callable

from absl import logging

from bridge.liveness import Doing, Pulse
from bridge.rollout_types import Heartbeat
from bridge.store.protocol import LearnerStore
from learner.distributed.channel import Hosts, OneHost

HEARTBEAT_S = 2.0
LISTEN_S = 1.0
"""How often the learner asks whether another of its processes was told to stop."""
LAST_BEAT_S = 10.0
"""How long the last one may take at the end: the store may be away."""
ACTORS_CHECK_S = 10.0
"""How often, while it waits, the learner looks whether an actor lives."""
NO_ACTOR_WARNING_S = 60.0


class Stopped(Exception):  # noqa: N818  # nothing went wrong
    """The process was asked to end; what is in the last checkpoint and the store is enough to go on."""


class Heart:
    """Says that the learner lives, from threads of its own, and how far it is; tells it when to stop."""

    def __init__(
        self,
        store: LearnerStore,
        stop: threading.Event,
        pulse: Pulse,
        *,
        lead_s: float,
        hosts: Hosts | None = None,
        say_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Not beating yet.

        Args:
          store: where it beats.
          stop: set when this process is asked to end.
          pulse: felt by who started this process.
          lead_s: `store.lead_s`.
          hosts: the learner's processes, each of which may be asked to end; this one alone if not given.
          say_alive: called wherever the learner waits; tells the others.
        """
        self._hosts, self._say_alive = hosts or OneHost(), say_alive
        self._store = store
        self._stop = stop
        self._pulse = pulse
        self._lead_s = lead_s
        self._failure: Exception | None = None
        self._thread_stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        # Apart: while the store is away a beat waits for it, and who is asked to end must be heard all the same.
        self._ear = threading.Thread(target=self._listen, name="ear", daemon=True)
        self._checked_s = self._warned_s = time.monotonic()
        self._is_alone = False
        self._has_updated = False

    def start(self) -> None:
        """Starts beating, and listening to the other processes."""
        self._thread.start()
        self._ear.start()

    def stop(self) -> None:
        """Beats a last time and ends; more than once is fine."""
        self._thread_stop.set()
        for thread in (self._thread, self._ear):
            if thread.ident is not None:
                thread.join(LAST_BEAT_S)

    def check(self) -> None:
        """Called wherever the learner waits for others.

        Raises:
          Stopped: a process of the learner was asked to end.
          HostLostError: the learner's other processes can't be reached.
          SupersededLearnerError: another learner leads the run.
          StoreLostError: the store was away for too long.
        """
        if self._stop.is_set():
            raise Stopped
        if self._failure is not None:
            raise self._failure
        self._say_alive()
        self._look_for_actors()
        self._pulse.work(Doing.ALONE if self._is_alone else Doing.WAITING)

    def worked(self) -> None:
        """Called wherever a part of the learner's work is done, and wherever a wait is over before more work begins.

        Up to the first update the next part may have to compile, which takes longer than work does.
        """
        self._pulse.work(Doing.WORKING if self._has_updated else Doing.STARTING)

    def updated(self) -> None:
        """Called after each update.

        Raises:
          What `check` does.
        """
        self._has_updated = True
        self.check()
        self.worked()

    def _look_for_actors(self) -> None:
        now = time.monotonic()
        if now - self._checked_s < ACTORS_CHECK_S:
            return
        self._checked_s = now
        self._is_alone = not live_actors(self._store)
        if self._is_alone and now - self._warned_s > NO_ACTOR_WARNING_S:
            self._warned_s = now
            logging.warning(
                "no live actor; start one with: python -m launch.actor --run_dir=..., elsewhere --store=... --run=..."
            )

    def _beat(self) -> None:
        while True:
            try:
                self._store.heartbeat(Heartbeat(process="learner", role="learner", pid=os.getpid(), time_s=time.time()))
                self._store.keep_lead(lease_s=self._lead_s)
            except Exception as e:  # raised where the learner next looks
                self._failure = e
                return
            if self._thread_stop.wait(min(HEARTBEAT_S, self._lead_s / 3)):
                return

    def _listen(self) -> None:
        while not self._thread_stop.wait(LISTEN_S):
            try:
                if self._hosts.is_asked_to_stop:
                    self._stop.set()
            except Exception as e:  # raised where the learner next looks
                self._failure = e
                return


def live_actors(store: LearnerStore) -> list[Heartbeat]:
    """The last signs of life of the actors that most likely live, by the store's clock."""
    since_s = store.now_s() - 5 * HEARTBEAT_S
    return [b for b in store.heartbeats() if b.role == "actor" and b.time_s > since_s]
