"""Measured profiles of engine, learner, store and network."""

import dataclasses
import json
import math
import os
import pathlib
import typing
from typing import Any

import msgspec
import numpy as np

from launch.tools.plan.workload import EpisodeProfile, LengthProfile
from learner.schedule.scale_down_criteria import HelperCosts


def _check(section: str, node: Any, *, counts: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{field.name} must be finite and >= 0, got {value}")
        if field.name in counts and value < 1:
            raise ValueError(f"{section}.{field.name} must be >= 1, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreProfile:
    """Store time per call under concurrent clients, in seconds: the inverse of calls/s.

    A store processes the writes of one run sequentially (`bridge/store/postgres/schema.sql`, `lock_run`), and on one
    server reads use the same cores. So the seconds of all calls are added, with a capacity of 1 s/s.
    """

    group_s: float
    """Seconds per group (per sample if samples are claimed), regardless of size: issue, put, read, acknowledge."""
    byte_s: float = 0.0
    """Additional seconds per byte of a group: transfer, write, read, encoding and decoding."""
    claim_call_s: float = 0.0
    """Seconds per claim, which takes the run's lock even without an open ticket."""
    write_s: float = 0.0
    """Seconds per small write without the run's lock: a heartbeat or a lease renewal."""
    read_s: float = 0.0
    """Seconds per small read."""
    row_s: float = 0.0
    """Seconds per row of a read of many rows. Counting engines reads as many rows without returning them."""
    listener_s: float = 0.0
    """Seconds per listening process and change (LISTEN)."""
    max_connections: int = 0
    """Connections that the server accepts, including reserved ones. 0 means no bound."""
    connections_per_process: int = 2
    """Connections per actor or learner: one listens, one queries."""
    link_bytes_per_s: float = 0.0
    """Bandwidth of the server's link per direction, in bytes/s. 0 means no bound."""

    def __post_init__(self) -> None:
        _check("store", self, counts=("connections_per_process",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """Network path of weights from learner hosts to actor hosts. A rate of 0 means no bound."""

    weights_bytes: int
    """Bytes of a full version, in the served dtype."""
    delta_bytes: int = 0
    """Bytes of a delta to the previous version. 0 means no deltas (as with publish.full_every=1)."""
    write_bytes_per_s: float = 0.0
    """Rate at which a learner host casts, copies and hashes its own rows during training, in bytes/s."""
    learner_bytes_per_s: float = 0.0
    """Bandwidth of one learner host's link per direction, in bytes/s."""
    serve_bytes_per_s: float = 0.0
    """Maximum send rate of one learner host's snapshot server, in bytes/s; TLS makes it CPU-bound."""
    actor_bytes_per_s: float = 0.0
    """Bandwidth of one actor host's link per direction, in bytes/s."""
    fetch_bytes_per_s: float = 0.0
    """Maximum rate at which one actor host receives and verifies weights, in bytes/s."""
    bucket_bytes_per_s: float = 0.0
    """Bandwidth of publish.bucket over all readers, in bytes/s."""
    chips_per_learner_host: int = 1
    engines_per_host: int = 1
    """Engines per actor host, which share one download."""

    def __post_init__(self) -> None:
        _check("network", self, counts=("weights_bytes", "chips_per_learner_host", "engines_per_host"))


def lowest(*rates: float) -> float:
    """Returns the lowest rate, where 0 means no bound; infinity if all are unbounded."""
    return min((r for r in rates if r), default=math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """Speed and capacity of an engine."""

    running: tuple[float, ...]
    """Increasing numbers of running sequences at which the throughput was measured."""
    tokens_per_s: tuple[float, ...]
    """Throughput of all sequences at each number, in tokens/s. Interpolated linearly from (0, 0), constant after the
    last."""
    max_num_seqs: int
    kv_capacity_tokens: int = 0
    """KV cache capacity in prompt and response tokens of all running sequences. 0 means no bound."""
    kv_watermark: float = 0.0
    """Share of the cache that must stay free when a waiting request starts next to others (vLLM's `watermark`)."""
    prefill_s_per_token: float = 0.0
    request_s: float = 0.0
    """Seconds per request regardless of its length (scheduling, input, output), in which nothing is decoded."""
    restart_s: float = 0.0
    """Seconds per request that starts again, preempted or for new weights, in addition to `prefill_s_per_token` of its
    tokens."""
    start_latency_s: float = 0.0
    """Seconds from a request's start in the engine to its first token, in addition to its prompt and `request_s`."""

    def __post_init__(self) -> None:
        if not self.running or len(self.running) != len(self.tokens_per_s):
            raise ValueError(
                "engine.running and engine.tokens_per_s must be lists of one length, at least 1; "
                f"got {len(self.running)} and {len(self.tokens_per_s)}"
            )
        if any(b <= a for a, b in zip((0, *self.running), self.running, strict=False)):
            raise ValueError(f"engine.running must be > 0 and rise, got {list(self.running)}")
        if any(not 0 < t < math.inf for t in self.tokens_per_s):
            raise ValueError(f"engine.tokens_per_s must be finite and > 0, got {list(self.tokens_per_s)}")
        if self.max_num_seqs < 1:
            raise ValueError(f"engine.max_num_seqs must be >= 1, got {self.max_num_seqs}")
        if not 0 <= self.kv_watermark < 1:
            raise ValueError(f"engine.kv_watermark must be in [0, 1), got {self.kv_watermark}")
        for name in ("kv_capacity_tokens", "prefill_s_per_token", "request_s", "restart_s", "start_latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"engine.{name} must be finite and >= 0, got {getattr(self, name)}")

    def throughput(self, num_running: float) -> float:
        """Returns the total tokens/s of `num_running` sequences."""
        return float(np.interp(min(num_running, self.max_num_seqs), (0.0, *self.running), (0.0, *self.tokens_per_s)))

    def speeds(self) -> list[float]:
        """Returns the tokens/s of one sequence among h running ones, for h = 0 .. max_num_seqs; 0 for h = 0."""
        h = np.arange(1, self.max_num_seqs + 1)
        total = np.interp(h, (0.0, *self.running), (0.0, *self.tokens_per_s))
        return [0.0, *(total / h).tolist()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerProfile:
    """Cost of training."""

    seconds_per_token: float
    """Chip-seconds per prompt or response token: forward, backward, and other work proportional to tokens."""
    micro_batch_s: float = 0.0
    """Seconds per micro-batch, regardless of its content and the number of chips."""
    micro_batch_tokens: int = 0
    """Tokens per micro-batch. 0 means packing.rows x packing.row_tokens."""
    optimizer_step_s: float = 0.0

    def __post_init__(self) -> None:
        _check("learner", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishProfile:
    """Cost of a weight update."""

    export_s: float = 0.0
    """Seconds of the export, which block the learner."""
    prefetch_s: float = 0.0
    """Seconds from the announcement to the pause, for notice, copy and verification; the engine generates meanwhile.
    Network time (`Profile.network`) is added."""
    pause_s: float = 0.0
    """Seconds without generation."""

    def __post_init__(self) -> None:
        _check("publish", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelperProfile(HelperCosts):
    """Cost of engines that give their chips up for training and take them back (RollPacker section 4.4)."""

    def __post_init__(self) -> None:
        _check("helpers", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """Input of the planner in addition to a config."""

    engine: EngineProfile
    response_tokens: LengthProfile
    prompt_tokens: LengthProfile
    learner: LearnerProfile
    publish: PublishProfile = PublishProfile()
    num_engines: int = 1
    chips_per_engine: int = 1
    """Chips of `engine`: its tensor parallel size."""
    engine_by_size: dict[int, EngineProfile] = dataclasses.field(default_factory=dict)
    """Engines of other tensor parallel sizes, by chips per engine (RollPacker section 4.1); `launch.tools.plan
    --search` tries them all."""
    num_learner_chips: int = 1
    """Chips of the learner. 0 means that it trains on the engines' chips: on all of them after a round's rollout, or
    with rounds.train_start=group_ready on half of them from some point of the round
    (`learner/schedule/scale_down_criteria.py`).
    """
    helpers: HelperProfile | None = None
    """Cost of giving engines' chips up for training. With a learner that has chips of its own, engines help it: half
    of them from some point of the round, and all of them after its rollout, where the round ends sooner by that. None
    means no helpers, and no cost for a learner without chips."""
    verifier_s: float = 0.0
    """Seconds from a group's last response to its storage."""
    claim_s: float = 0.0
    """Seconds from a ticket's issue until a polling actor sees it."""
    zero_variance_groups: float = 0.0
    """Share of groups with zero reward variance; used with rounds.filter_zero_variance."""
    episodes: EpisodeProfile | None = None
    """Multi-turn episodes. None means that a response is one turn without an environment."""
    store: StoreProfile | None = None
    """Store. None means no cost and unlimited capacity."""
    network: NetworkProfile | None = None
    """Network. None means that `publish` is the whole cost of a weight update, for any number of hosts."""

    def __post_init__(self) -> None:
        for name, least in (("num_engines", 1), ("chips_per_engine", 1), ("num_learner_chips", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.chips_per_engine in self.engine_by_size or min(self.engine_by_size, default=1) < 1:
            raise ValueError(
                f"engine_by_size: expected sizes >= 1 other than chips_per_engine={self.chips_per_engine}, got "
                f"{sorted(self.engine_by_size)}"
            )
        if self.verifier_s < 0 or self.claim_s < 0:
            raise ValueError(f"verifier_s and claim_s must be >= 0, got {self.verifier_s} and {self.claim_s}")
        if not 0 <= self.zero_variance_groups < 1:
            raise ValueError(f"zero_variance_groups must be in [0, 1), got {self.zero_variance_groups}")

    def sizes(self) -> dict[int, "Profile"]:
        """Returns this profile with each engine that was measured, by chips per engine."""
        engines = {self.chips_per_engine: self.engine} | self.engine_by_size
        return {
            size: dataclasses.replace(self, engine=engine, chips_per_engine=size, engine_by_size={})
            for size, engine in sorted(engines.items())
        }

    @property
    def num_chips(self) -> int:
        """Number of chips of engines and learner in total."""
        return self.num_engines * self.chips_per_engine + self.num_learner_chips


def from_dict(raw: Any) -> Profile:
    """Builds a profile from plain data; raises ValueError if a field is missing, unknown or of the wrong type."""
    _refuse_unknown(raw, Profile, "profile")
    try:
        return msgspec.convert(raw, Profile, str_keys=True)
    except msgspec.ValidationError as e:
        raise ValueError(f"profile: {e}".replace("`$.", "`")) from e


def load(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile from a JSON file; raises ValueError if the file is missing, not JSON, or not a profile."""
    try:
        raw = json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError as e:
        raise ValueError(f"no profile {str(path)!r}; see docs/planning.md") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    try:
        return from_dict(raw)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e


def _refuse_unknown(raw: Any, kind: Any, path: str) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(raw).__name__}")
    fields = {f.name: f.type for f in dataclasses.fields(kind)}
    for name, value in raw.items():
        if name not in fields:
            raise ValueError(f"{path} has no field {name!r}; it has {', '.join(fields)}")
        for part in (fields[name], *typing.get_args(fields[name])):  # also handles `Part | None`
            if dataclasses.is_dataclass(part) and value is not None:
                is_mapping = typing.get_origin(fields[name]) is dict and isinstance(value, dict)
                for one in value.values() if is_mapping else (value,):
                    _refuse_unknown(one, part, name)
