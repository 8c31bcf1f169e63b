"""What parts of a run are given: store, leadership, wait hooks."""

import pathlib
import time
from collections.abc import Callable

from absl import logging

from bridge.credentials import Token
from bridge.files import lock_owner
from bridge.snapshots.snapshot_format import sign
from bridge.store.open import create_run, namesakes, open_store
from bridge.store.protocol import GroupStore, LearnerLivesError, LearnerStore
from bridge.weight_types import Announcement
from configs.run_folder import run_id, store_url
from configs.schema import Config
from learner.heartbeat import LearnerHeartbeat
from learner.schedule.sample_tickets import SampleTickets

POLL_INTERVAL_S = 1.0


def open_run_store(config: Config, folder: pathlib.Path) -> GroupStore:
    """The run's store; the run is made in it where it is new.

    Raises:
      ValueError: the store can't be used; one line says why.
      TimeoutError: it can't be reached.
    """
    url, run, retry_s = store_url(config), run_id(folder), config.store.outage_timeout_s
    create_run(url, run=run, name=config.run.name, actor_role=config.store.actor_role, retry_s=retry_s)
    if others := namesakes(url, config.run.name, run=run, retry_s=retry_s):
        logging.warning(
            "other runs called %s are not finished: %s. An actor can't tell them apart by name: drop those that will "
            "not go on (python -m launch.tools.runs --drop=ID), or give actors --run=%s",
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
        inline_bytes=config.store.inline_bytes,
    )


def acquire_leadership(store: LearnerStore, config: Config, folder: pathlib.Path) -> int:
    """Becomes the run's one learner; waits for the lease of one elsewhere that may be dead. Returns the incarnation.

    Raises:
      LearnerLivesError: a learner elsewhere lives.
    """
    lease_s = config.store.leader_lease_s
    deadline = time.monotonic() + lease_s + POLL_INTERVAL_S
    has_said = False
    while True:
        try:
            return store.acquire_leadership(lock_owner(folder), lease_s=lease_s)
        except LearnerLivesError as e:
            if time.monotonic() > deadline:
                raise
            if not has_said:
                logging.warning("%s; waiting whether it ends", e)
                has_said = True
            time.sleep(POLL_INTERVAL_S)


def by_samples(store: LearnerStore, config: Config) -> LearnerStore:
    """What the learner's books see of the store: whole groups, also where single samples are tickets."""
    if config.admission.unit == "group":
        return store
    rounds = config.rounds
    return SampleTickets(store, num_samples=rounds.samples_per_group, num_requests=rounds.requests_per_group)


def announcer(store: LearnerStore, token: Token | None) -> Callable[[Announcement], None]:
    """How the learner tells actors of a version and its sources: signed, where there is a token."""

    def announce(announcement: Announcement) -> None:
        store.announce(sign(announcement, token) if token is not None else announcement)

    return announce


class Waiting:
    """Handed to whatever waits; what needs the whole run joins it once there is one."""

    def __init__(self, heartbeat: LearnerHeartbeat) -> None:
        """Nothing is looked after yet."""
        self._heart = heartbeat
        self.wait_hooks: list[Callable[[], None]] = []
        """None of them waits itself."""

    def check(self) -> None:
        """Called on every look that found nothing.

        Raises:
          What `LearnerHeartbeat.check` does.
        """
        self._heart.check()
        self.look()

    def look(self) -> None:
        """Called between two micro-batches."""
        for look in self.wait_hooks:
            look()
