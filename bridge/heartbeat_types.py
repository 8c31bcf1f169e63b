"""Wire types of heartbeats and actor reports."""

import dataclasses
import math
from typing import Annotated, Literal

from msgspec import Meta

from bridge.rollout_types import Version
from bridge.validation import check_name

MAX_SPEEDS = 32
"""Maximum rows of `ActorReport.decode_speeds`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpeed:
    """Decoding steps of an engine with about equally many running sequences, each of which samples one token."""

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_tokens) < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(f"decode speed: numbers must be finite and >= 0, got {self}")

    def __add__(self, other: "DecodeSpeed") -> "DecodeSpeed":
        return DecodeSpeed(
            num_steps=self.num_steps + other.num_steps,
            num_tokens=self.num_tokens + other.num_tokens,
            seconds=self.seconds + other.seconds,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActorReport:
    """Metrics of an actor in its heartbeat. Counts are cumulative since the actor started unless stated otherwise."""

    prefetch_s: float | None = None
    """Seconds to copy and hash the newest weights, concurrent with generation; None before the first weight update."""
    verify_s: float | None = None
    """Seconds to compare the newest weights with the model, during generation; None before the first weight update."""
    pause_s: float | None = None
    """Seconds for which the newest weight update paused generation; None before the first weight update."""
    load_s: float | None = None
    """Seconds of `pause_s` spent on loading and verifying the weights; None before the first weight update."""
    num_refused_snapshots: int
    """Rejected snapshots; each attempt counts."""
    num_in_service: int
    """Tickets in service now."""
    num_waiting: int
    """Claimed tickets whose requests have not started yet."""
    is_shutting_down: bool
    """True if the actor claims no more tickets and exits after it has submitted its groups."""
    num_groups: int
    """Submitted groups."""
    num_dropped_groups: int
    """Groups that failed."""
    num_verifier_failures: int
    """Failures and hangs of verifiers, including the judge; counted even if a retry succeeded."""
    num_judge_retries: int
    """Failed judge requests that were retried."""
    num_judge_failures: int
    """Responses that the judge could not score."""
    num_episode_failures: int
    """Failures and hangs of environments, even if a retry succeeded; the fields `num_episode_*` count causes."""
    num_episode_deadlines: int = 0
    """Episodes whose environment exceeded its time limit."""
    num_episode_crashes: int = 0
    """Episodes whose environment process crashed."""
    num_episode_exceptions: int = 0
    """Episodes whose environment raised an exception."""
    num_episode_bad_replies: int = 0
    """Episodes whose environment sent a malformed reply: too large, not a step, or an invalid reward."""
    num_episode_bad_starts: int = 0
    """Episodes that could not start: the environment's library is missing, or the row cannot be sent."""
    num_sampled_tokens: int
    """Tokens that the engine sampled."""
    num_submitted_tokens: int
    """Sampled tokens in submitted groups."""
    max_sequences: int
    """Current limit on concurrent requests: the engine's capacity, or environments.max_in_flight."""
    num_running: int
    """Requests running in the engine now."""
    num_engine_waiting: int
    """Requests in the engine's own queue now."""
    kv_usage: float
    """Fraction of the KV cache in use now, in [0, 1]."""
    kv_usage_peak: float
    """Peak `kv_usage` since the served weights were loaded."""
    kv_tokens: int = 0
    """KV cache capacity, in tokens."""
    wake_s: float | None = None
    """Seconds from the last return of the engine's devices until it served again; None if it never gave them up."""
    num_preempted: int
    """Requests that the engine preempted because the KV cache was full."""
    decode_speeds: Annotated[tuple[DecodeSpeed, ...], Meta(max_length=MAX_SPEEDS)] = ()
    """Decoding steps by running sequences: entry i is for 2^i to 2^(i+1) - 1 sequences. Empty if not measured."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "decode_speeds" and value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} must be finite and >= 0, got {value}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Liveness message of a learner or actor."""

    process: str
    role: Literal["learner", "actor"]
    pid: int
    time_s: float
    version: Version | None = None
    """Weight version that an actor serves."""
    report: ActorReport | None = None
    """Report of an actor; None while its engine starts."""

    def __post_init__(self) -> None:
        check_name("process", self.process)
        if not math.isfinite(self.time_s):
            raise ValueError(f"time_s must be finite, got {self.time_s}")
