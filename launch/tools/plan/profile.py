"""Measured profiles of engine, learner, store, network."""

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


def _check(section: str, node: "StoreProfile | NetworkProfile", *, least: int, counts: tuple[str, ...]) -> None:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{field.name} must be finite and >= 0, got {value}")
        if field.name in counts and value < least:
            raise ValueError(f"{section}.{field.name} must be >= {least}, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreProfile:
    """Seconds of the store's time that calls take when many clients ask at once: one over the calls a second.

    A store serves one run's writes one after the other (`bridge/store/postgres/schema.sql`, `lock_run`), and on one
    server reads take the same cores. So all calls' seconds are added up, and a second has one.
    """

    group_s: float
    """Of a group, or single sample where those are claimed, whatever its size: offered, put, read, acknowledged."""
    byte_s: float = 0.0
    """Of each byte of it on top: sent in, written, read, sent out, encoded and decoded."""
    claim_call_s: float = 0.0
    """Of a claim, which takes the run's lock whether or not it finds a ticket."""
    write_s: float = 0.0
    """Of a small write that waits for no other of the run: a heartbeat, leases renewed."""
    read_s: float = 0.0
    """Of a small read."""
    row_s: float = 0.0
    """Of each row of a read that returns many. Where the store counts engines it looks at as many, and sends none."""
    listener_s: float = 0.0
    """Of telling one more process of a change (LISTEN)."""
    max_connections: int = 0
    """That the server takes, its own among them; 0: no bound."""
    connections_per_process: int = 2
    """Of an actor or learner: one that listens, and one that asks."""
    link_bytes_per_s: float = 0.0
    """Of the server's network, each way; 0: no bound."""

    def __post_init__(self) -> None:
        """Checks the signs."""
        _check("store", self, least=1, counts=("connections_per_process",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """How weights get from learner hosts to actor hosts. A rate of 0 has no bound."""

    weights_bytes: int
    """Of a version in full, in the served dtype."""
    delta_bytes: int = 0
    """Of a version as a delta against the one before; 0: no deltas are made (as with publish.full_every=1)."""
    write_bytes_per_s: float = 0.0
    """That a learner host casts, copies and hashes of its own rows, while training goes on."""
    learner_bytes_per_s: float = 0.0
    """Of one learner host's link, each way."""
    serve_bytes_per_s: float = 0.0
    """That one learner host's snapshot server sends, if the link lets it: with TLS it is bounded by its cores."""
    actor_bytes_per_s: float = 0.0
    """Of one actor host's link, each way."""
    fetch_bytes_per_s: float = 0.0
    """That one actor host takes in and verifies, if the link lets it."""
    bucket_bytes_per_s: float = 0.0
    """Of publish.bucket, all readers together."""
    chips_per_learner_host: int = 1
    engines_per_host: int = 1
    """Those of one host share one download."""

    def __post_init__(self) -> None:
        """Checks the signs and that there is a model."""
        _check("network", self, least=1, counts=("weights_bytes", "chips_per_learner_host", "engines_per_host"))


def lowest(*rates: float) -> float:
    """The lowest of rates of which 0 has no bound; infinity if none has one."""
    return min((r for r in rates if r), default=math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """What an engine can do."""

    running: tuple[float, ...]
    """Numbers of running sequences that the throughput was measured at, rising."""
    tokens_per_s: tuple[float, ...]
    """All sequences together, at each of them. Linear between, through (0, 0) before, constant after."""
    max_num_seqs: int
    kv_capacity_tokens: int = 0
    """Prompt and response tokens of all running sequences; 0 for no bound."""
    kv_watermark: float = 0.0
    """Share of the cache that stays free when a waiting request starts beside others (vLLM's `watermark`; 0 too)."""
    prefill_s_per_token: float = 0.0
    request_s: float = 0.0
    """What a request costs whatever its length: being taken in, scheduled, handed back. Nothing is decoded meanwhile.
    A request that was ended for new weights and goes on as another one costs it again."""
    start_latency_s: float = 0.0
    """From a request's start in the engine to its first token, on top of its prompt and of `request_s`."""

    def __post_init__(self) -> None:
        """Checks the table and the bounds."""
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
        for name in ("kv_capacity_tokens", "prefill_s_per_token", "request_s", "start_latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"engine.{name} must be finite and >= 0, got {getattr(self, name)}")

    def throughput(self, num_running: float) -> float:
        """Returns the tokens/s of all sequences together when so many run."""
        return float(np.interp(min(num_running, self.max_num_seqs), (0.0, *self.running), (0.0, *self.tokens_per_s)))

    def speeds(self) -> list[float]:
        """Tokens/s of one sequence when h run, for h = 0 .. max_num_seqs; 0 for none."""
        h = np.arange(1, self.max_num_seqs + 1)
        total = np.interp(h, (0.0, *self.running), (0.0, *self.tokens_per_s))
        return [0.0, *(total / h).tolist()]


def _not_negative(section: str, node: Any) -> None:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{field.name} must be finite and >= 0, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerProfile:
    """What training costs."""

    seconds_per_token: float
    """Of one chip, for a token of prompt or response: forward, backward, and what else grows with the tokens."""
    micro_batch_s: float = 0.0
    """Of each micro-batch, whatever it holds and however many chips there are."""
    micro_batch_tokens: int = 0
    """Tokens that a micro-batch holds; 0: packing.rows x packing.row_tokens."""
    optimizer_step_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks the signs."""
        _not_negative("learner", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishProfile:
    """What new weights cost."""

    export_s: float = 0.0
    """The learner, which stands still meanwhile."""
    prefetch_s: float = 0.0
    """From the announcement to the pause: noticing it, copy, check; the engine generates meanwhile. What a network
    takes (`Profile.network`) comes on top."""
    pause_s: float = 0.0
    """Generation stands still."""

    def __post_init__(self) -> None:
        """Checks the signs."""
        _not_negative("publish", self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """All that the planner wants to know beside a config."""

    engine: EngineProfile
    response_tokens: LengthProfile
    prompt_tokens: LengthProfile
    learner: LearnerProfile
    publish: PublishProfile = PublishProfile()
    num_engines: int = 1
    chips_per_engine: int = 1
    num_learner_chips: int = 1
    """0: the learner has none of its own and trains on the engines'. All of them are its own when a round's rollout has
    ended; with rounds.train_start=group_ready half of them from some point in the round on
    (`launch/tools/plan/sim/chips.py`)."""
    verifier_s: float = 0.0
    """From a group's last response to its place in the store."""
    claim_s: float = 0.0
    """From a ticket's issue to an actor that looks for it."""
    zero_variance_groups: float = 0.0
    """Share of the groups whose rewards are all equal; it matters with rounds.filter_zero_variance."""
    episodes: EpisodeProfile | None = None
    """None: a response is one turn, without an environment."""
    store: StoreProfile | None = None
    """None: it costs nothing and takes everything."""
    network: NetworkProfile | None = None
    """None: what publish says of new weights is all there is to them, however many hosts there are."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        for name, least in (("num_engines", 1), ("chips_per_engine", 1), ("num_learner_chips", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.verifier_s < 0 or self.claim_s < 0:
            raise ValueError(f"verifier_s and claim_s must be >= 0, got {self.verifier_s} and {self.claim_s}")
        if not 0 <= self.zero_variance_groups < 1:
            raise ValueError(f"zero_variance_groups must be in [0, 1), got {self.zero_variance_groups}")

    @property
    def num_chips(self) -> int:
        """Of engines and learner together."""
        return self.num_engines * self.chips_per_engine + self.num_learner_chips


def from_dict(raw: Any) -> Profile:
    """Builds a profile from plain data.

    Raises:
      ValueError: a field is missing, unknown or of another type; it is named.
    """
    _refuse_unknown(raw, Profile, "profile")
    try:
        return msgspec.convert(raw, Profile)
    except msgspec.ValidationError as e:
        raise ValueError(f"profile: {e}".replace("`$.", "`")) from e


def to_dict(profile: Profile) -> dict[str, Any]:
    """Plain data that `from_dict` reads back."""
    return dataclasses.asdict(profile)


def load(path: str | os.PathLike[str]) -> Profile:
    """Reads a JSON file.

    Raises:
      ValueError: it isn't there, is no JSON or no profile.
    """
    try:
        raw = json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError as e:
        raise ValueError(f"there is no profile {str(path)!r}; launch/README.md shows what one holds") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is no JSON: {e}") from e
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
        for part in (fields[name], *typing.get_args(fields[name])):  # also of `Part | None`
            if dataclasses.is_dataclass(part) and value is not None:
                _refuse_unknown(value, part, name)
