"""Run context: store, leader lease, heartbeat and wait hooks that components share."""

import dataclasses
import pathlib
import signal
import threading
import time
from collections.abc import Callable

from absl import logging

from bridge.credentials import Token
from bridge.device_turns import TrainerTurn
from bridge.files import RunLock, lock_owner
from bridge.liveness import Liveness
from bridge.processes import stop_signals
from bridge.snapshots.snapshot_format import sign
from bridge.store.open import SqlStore, create_run, namesakes, open_store
from bridge.store.sql.learner_side import LearnerStore
from bridge.store.store_types import LearnerLivesError
from bridge.timeline import Timeline
from bridge.weight_types import Announcement
from configs.run_folder import RunFolder, run_id, store_url
from configs.schema import Config
from learner.heartbeat import LearnerHeartbeat
from learner.replicate import Replicator

POLL_INTERVAL_S = 1.0


def open_run_store(config: Config, folder: pathlib.Path) -> SqlStore:
    """Opens the run's store, and creates the run in it if it is new.

    Raises ValueError, with a message of one line, if the store is unusable, and TimeoutError if it is unreachable.
    """
    url, run, retry_s = store_url(config), run_id(folder), config.store.outage_timeout_s
    create_run(url, run=run, name=config.run.name, actor_role=config.store.actor_role, retry_s=retry_s)
    if others := namesakes(url, config.run.name, run=run, retry_s=retry_s):
        logging.warning(
            "other unfinished runs have the name %s: %s. Actors cannot select a run by this name: drop the abandoned "
            "runs (python -m launch.tools.runs --drop=ID), or start actors with --run=%s",
            config.run.name,
            ", ".join(others),
            run,
        )
    return open_store(
        url,
        run=run,
        busy_timeout_s=config.supervision.lock_wait_s,
        retry_s=retry_s,
        bucket=config.store.bucket,
    )


def acquire_leadership(store: LearnerStore, config: Config, folder: pathlib.Path) -> int:
    """Acquires the leader lease and returns the incarnation; waits for another learner's lease to expire.

    Raises LearnerLivesError if the other learner renews its lease.
    """
    lease_s = config.supervision.leader_lease_s
    deadline = time.monotonic() + lease_s + POLL_INTERVAL_S
    has_said = False
    while True:
        try:
            return store.acquire_leadership(lock_owner(folder), lease_s=lease_s)
        except LearnerLivesError as e:
            if time.monotonic() > deadline:
                raise
            if not has_said:
                logging.warning("%s; waiting for its lease to expire", e)
                has_said = True
            time.sleep(POLL_INTERVAL_S)


def announcer(store: LearnerStore, token: Token | None) -> Callable[[Announcement], None]:
    """Returns the function that announces a version and its sources to actors, signed if there is a token."""

    def announce(announcement: Announcement) -> None:
        store.announce(sign(announcement, token) if token is not None else announcement)

    return announce


@dataclasses.dataclass
class RunContext:
    """Resources that most components of a run need."""

    config: Config
    folder: pathlib.Path
    lead: Replicator
    lock: RunLock
    store: SqlStore
    incarnation: int
    finished_step: int | None
    """Step at which the run had finished before this start reopened it, or None."""
    heartbeat: LearnerHeartbeat
    timeline: Timeline
    turn: TrainerTurn | None = None
    """Turn on the devices that engines share (actor.colocated); None if the learner has its own."""
    wait_hooks: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Functions called while the learner waits; they must not block."""

    def check(self) -> None:
        """Runs the heartbeat checks and the wait hooks; called on each poll that found nothing. Both may raise."""
        self.heartbeat.check()
        self.look()

    def await_turn(self) -> None:
        """Reports progress and checks for a stop, while the learner waits for devices before its first update."""
        self.heartbeat.report_progress()
        self.heartbeat.check()

    def look(self) -> None:
        """Runs the wait hooks; called between micro-batches."""
        for hook in self.wait_hooks:
            hook()


def open_context(config: Config, folder: pathlib.Path, lead: Replicator, liveness: Liveness) -> RunContext:
    """Opens the store, acquires leadership and starts the heartbeat; stop signals request a stop from now on.

    Raises what `open_run_store` and `acquire_leadership` raise.
    """
    lock = RunLock(RunFolder(folder).learner_lock, "learner")
    store = open_run_store(config, folder)
    finished = store.finished()  # before acquire_leadership(), which clears the finished flag
    incarnation = acquire_leadership(store, config, folder)
    stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    heartbeat = LearnerHeartbeat(
        store,
        stop,
        liveness,
        leader_lease_s=config.supervision.leader_lease_s,
        hosts=lead.hosts,
        say_alive=lead.keep_alive,
        has_actors=not config.loss.is_supervised,
    )
    heartbeat.start()  # before the restore, which may take longer than the lease
    return RunContext(
        config,
        folder,
        lead,
        lock,
        store=store,
        incarnation=incarnation,
        finished_step=None if finished is None else finished.version.step,
        heartbeat=heartbeat,
        timeline=Timeline(RunFolder(folder).events, "learner"),
        turn=TrainerTurn(folder) if config.actor.colocated else None,
    )
