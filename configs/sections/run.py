"""Run, store, checkpoint, supervision, samples."""

import dataclasses
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
    """When the learner saves, and how many saves are kept."""

    every_n_steps: Count = 50
    """Updates between two checkpoints. With publish.when=round_end a save that falls due inside a round waits for the
    round's end."""
    keep: Count = 2
    max_failed_in_a_row: Count = 3
    """The run ends when so many saves in a row failed, as on a full disk. Until then training goes on, and the store
    keeps the groups that no checkpoint has."""

    on_stop: bool = True
    """Whether a learner that is told to stop (Ctrl-C, a time limit, a machine that is taken away) saves first.

    By rounds only between a round's end and the next update. What is not saved the next start trains again, from groups
    that the store still has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep < 2:
            raise ValueError(
                "checkpoint.keep must be >= 2 (while one is being written, the one before is all there is to fall "
                f"back on), got {self.keep}"
            )


MAX_NAME_CHARS = 200
"""A file name has at most 255 bytes, and the names made from a run's add some."""
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(CheckedSection):
    """Where a run lives and when it ends."""

    name: str = "run"
    """Names its folder, and the run in its store and its trackers."""
    dir: LocalPath = ""
    """The run's folder; empty means runs/<name>. A folder of the same config is resumed."""
    seed: Seed = 0
    """Of the order of prompts, and of what is sampled from them."""
    num_updates: Count = 100
    """Optimizer steps to train for."""
    trackers: str = "tensorboard"
    """Where metrics are shown besides metrics.jsonl: of tensorboard, wandb, mlflow and trackio those wanted, with
    commas between them; empty for none. Each but the first is an extra of its name, and takes its server and its key
    from its own environment (docs/trackers.md)."""
    project: str = "sluice"
    """The trackers' project, or MLflow's experiment."""

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
            raise ValueError(f"run.trackers knows {', '.join(TRACKERS)}, got {unknown[0]!r}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.project):
            raise ValueError(f"run.project must be letters, digits, '.', '_' or '-', got {self.project!r}")

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """`trackers`, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.trackers.split(",") if name.strip()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplesConfig(CheckedSection):
    """Which groups are kept as text in samples.jsonl; nothing of it changes what is trained."""

    groups_per_round: CountOrZero = 4
    """Trained groups of each round, spread over it in the order in which they are trained; 0: none."""
    eval_problems: CountOrZero = 16
    """Problems of each evaluation, always the same ones; 0: none."""
    responses: Count = 8
    """Of a group at most; the best, the worst and what lies evenly between."""
    chars: Count = 4000
    """Of a prompt or a response at most; a longer one is cut in its middle."""
    max_mib: Positive = 64.0
    """Size of the file in MiB; what would be more thins its older half, again and again, and leaves each set's first
    evaluation, while these take a quarter of it at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chars < 100:
            raise ValueError(f"samples.chars must be at least 100, got {self.chars}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig(CheckedSection):
    """Where tickets, groups and heartbeats are kept."""

    url: LocalPath = ""
    """postgresql://user@host/database?sslmode=verify-full where actors run on other machines; empty: a SQLite file in
    the run's folder, also written sqlite:///FILE. A password comes from PGPASSFILE or PGPASSWORD, never from here."""
    bucket: LocalPath = ""
    """s3://..., gs://... or file://... for groups larger than inline_bytes; empty: they stay in the database."""
    inline_bytes: Count = 4 * 2**20
    """Size of a group from which on it goes to the bucket, where there is one."""
    actor_role: str = "sluice_actor"
    """PostgreSQL role that may serve this run: a login of the actors, or a group of such."""
    leader_lease_s: Seconds = 30.0
    """A learner elsewhere may take the run over after this one has been silent for so long."""
    outage_timeout_s: Seconds = 600.0
    """How long a store that can't be reached is tried again before a process gives up and ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if secret := secret_in(self.url):
            raise ValueError(
                f"store.url holds a {secret}, and the config is kept in files; use PGPASSFILE or PGPASSWORD"
            )
        shown = self.url.partition("://")[0]  # the rest may hold a secret
        if self.url and not self.url.startswith(("sqlite:///", "postgresql://", "postgres://")):
            raise ValueError(f"store.url must be sqlite:///FILE or postgresql://..., got {shown!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisionConfig(CheckedSection):
    """When a process that lives is taken to hang; it is killed then, with all that it started, and started again.

    Every time is one in which its watcher was running itself, so neither a set clock nor a suspended machine makes a
    healthy process look hung. They may differ when a run is continued.
    """

    heartbeat_timeout_s: Seconds = 30.0
    """No heartbeat of a learner or an actor for so long, or a process of an engine that was stopped for so long."""
    first_heartbeat_timeout_s: Seconds = 120.0
    """The same for a process that was started just now and has not beaten yet."""
    start_timeout_s: Seconds = 1800.0
    """A learner that beats, and gets no part of its start done for so long: reading weights, restoring a checkpoint,
    and whatever it compiles up to its first update. An actor's bound is actor.start_timeout_s."""
    progress_timeout_s: Seconds = 600.0
    """A learner that beats, and neither gets a part of its work done (a micro-batch, an update, a publish, a
    checkpoint) nor waits for others, for so long."""
    engine_timeout_s: Seconds = 120.0
    """An engine that has requests and samples no token for so long, weight updates aside; an actor that beats, and
    whose loop does not turn for so long."""
    swap_timeout_s: Seconds = 120.0
    """A weight update that takes an engine longer."""
    shutdown_grace_s: Seconds = 120.0
    """How long a learner that is told to stop may take to end before it is killed: its micro-batch or update under way,
    and the save of checkpoint.on_stop. On a cluster launch.tools.deploy sets it to --grace_s."""

    @property
    def lock_wait_s(self) -> float:
        """How long a process waits for a lock: another one that was stopped with it is found and killed meanwhile."""
        return 4 * self.heartbeat_timeout_s
