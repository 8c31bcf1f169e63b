"""Config sections of the run: store, checkpoints, supervision and samples."""

import dataclasses
import math
import re

from bridge.store.url_login import secret_in
from configs.sections.base import (
    CheckedSection,
    Count,
    CountOrZero,
    LocalPath,
    Positive,
    Seconds,
    Seed,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(CheckedSection):
    """Checkpoints of the learner."""

    every_n_steps: Count = 50
    """Updates between two checkpoints. With publish.when=round_end, a checkpoint due within a round is saved at its
    end. A learner that is stopped (Ctrl-C, SIGTERM, preemption) also saves. With publish.when=round_end, it saves only
    between the end of a round and the next update."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 2:
            raise ValueError(
                f"checkpoint.keep must be >= 2, so that one complete checkpoint exists during a save, got {self.keep}"
            )


MAX_NAME_CHARS = 200
"""Largest length of run.name. File names derived from it are longer and have at most 255 bytes."""
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(CheckedSection):
    """Identity, folder, length and trackers of a run."""

    name: str = "run"
    """Name of the run. It names the folder and the run in the store and trackers."""
    dir: LocalPath = ""
    """Folder of the run. A folder with an equal config is resumed. Empty: runs/<name>."""
    seed: Seed = 0
    """Seed for prompt order, generated problems and adapter initialization. Does not seed sampling in the engine."""
    num_updates: Count = 100
    """Number of updates to train. Each update is rounds.epochs optimizer steps."""
    trackers: str = "tensorboard"
    """Comma-separated metric trackers in addition to metrics.jsonl: tensorboard, wandb, mlflow, trackio. All except
    tensorboard require the extra of that name, and read their server and key from their own environment variables
    (docs/report.md). Empty: none."""
    project: str = "sluice"
    """Project name in trackers; the experiment in MLflow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"run.name must be letters, digits, '.', '_' or '-' (it names a folder), got {self.name!r}"
            )
        if len(self.name) > MAX_NAME_CHARS:
            raise ValueError(
                f"run.name must have at most {MAX_NAME_CHARS} characters (it names folders), got {len(self.name)}"
            )
        unknown = [name for name in self.tracker_names if name not in TRACKERS]
        if unknown:
            raise ValueError(f"run.trackers: expected some of {', '.join(TRACKERS)}, got {unknown[0]!r}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.project):
            raise ValueError(f"run.project must be letters, digits, '.', '_' or '-', got {self.project!r}")

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """Tracker names in `trackers`, without duplicates."""
        return tuple(dict.fromkeys(name.strip() for name in self.trackers.split(",") if name.strip()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesConfig(CheckedSection):
    """Groups stored as text in samples.jsonl. These fields do not affect training."""

    groups_per_round: CountOrZero = 4
    """Trained groups stored per round, spread evenly over the round. 0: none."""
    max_mib: Positive = 64.0
    """Largest size of samples.jsonl, in MiB. A full file drops part of its older half. The first evaluation of each set
    stays while it takes at most a quarter of the size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig(CheckedSection):
    """Store of tickets, groups and heartbeats."""

    url: LocalPath = ""
    """URL of the store. `postgresql://user@host/database?sslmode=verify-full`: required for actors on other machines.
    `sqlite:///FILE`: a SQLite file. Empty: a SQLite file in the run's folder. Set passwords with PGPASSFILE or
    PGPASSWORD; a URL with a password is rejected."""
    bucket: LocalPath = ""
    """Bucket URL (s3://..., gs://... or file://...) for groups larger than 4 MiB. Empty: all groups stay in the
    database."""
    actor_role: str = "sluice_actor"
    """PostgreSQL role that may serve the run: the login role of the actors, or a group role of theirs."""
    outage_timeout_s: Seconds = 600.0
    """Time that a process retries an unreachable store before it exits, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if secret := secret_in(self.url):
            raise ValueError(
                f"store.url must not contain a {secret}, because the config is stored in files. Use PGPASSFILE or "
                "PGPASSWORD"
            )
        shown = self.url.partition("://")[0]  # the rest may hold a secret
        if self.url and not self.url.startswith(("sqlite:///", "postgresql://", "postgres://")):
            raise ValueError(f"store.url must be sqlite:///FILE or postgresql://..., got {shown!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisionConfig(CheckedSection):
    """Hang detection: a hung process and its children are killed and restarted.

    Timeouts count only time in which the watching process itself ran, so clock changes and machine suspension are
    harmless. These fields may change when a run is resumed.
    """

    heartbeat_timeout_s: Seconds = 30.0
    """Heartbeat timeout of learners and actors, in seconds. It also limits how long an engine process may be suspended
    (SIGSTOP), and is the duration of the leader lease. The first heartbeat of a process may take four times as long.
    Twice as long, the processes of one learner wait for a heartbeat of each other, and then exit and restart. Set it
    above half the longest pause of a healthy network or host."""
    start_timeout_s: Seconds = 1800.0
    """Time without startup progress after which a learner counts as hung, in seconds. Startup covers weights,
    checkpoint restore and compilation up to the first update. It also limits the startup of an actor's engine and of a
    colocated judge. Processes of one learner connect within a sixth of it."""
    progress_timeout_s: Seconds = 600.0
    """Time without progress after which a learner counts as hung, in seconds. Progress is a micro-batch, update,
    publish or checkpoint; waiting for other processes is excluded."""
    engine_timeout_s: Seconds = 120.0
    """Time after which an engine counts as hung, in seconds: without new tokens despite requests, or within one weight
    update. It also limits an actor whose event loop is blocked."""
    shutdown_grace_s: Seconds = 120.0
    """Time after a stop request until the learner is killed, in seconds. It covers the current micro-batch or update
    and the last checkpoint. On a cluster, launch.tools.deploy sets it to --grace_s."""

    @property
    def first_heartbeat_timeout_s(self) -> float:
        """Timeout for the first heartbeat of a new process, in seconds."""
        return 4 * self.heartbeat_timeout_s

    @property
    def leader_lease_s(self) -> float:
        """Duration of the leader lease, in seconds. Another learner can acquire leadership after it expires."""
        return self.heartbeat_timeout_s

    @property
    def peer_timeout_s(self) -> int:
        """Time without a heartbeat after which a process of one learner counts as dead to the others, in seconds."""
        return math.ceil(2 * self.heartbeat_timeout_s)

    @property
    def connect_timeout_s(self) -> int:
        """Timeout for all processes of one learner to connect, in seconds. Shorter than the hang timeout."""
        return math.ceil(self.start_timeout_s / 6)

    @property
    def lock_wait_s(self) -> float:
        """Timeout for a run lock, in seconds. A suspended holder is found and killed within it."""
        return 4 * self.heartbeat_timeout_s
