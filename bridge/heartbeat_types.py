"""What processes say of themselves: heartbeats, and an actor's report."""

import dataclasses
import math
from typing import Literal

from bridge.rollout_types import Version
from bridge.validation import check_name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActorReport:
    """What an actor says of itself in a heartbeat; counts without another word are since its start."""

    prefetch_s: float | None = None
    """Copy and hash of the newest weights, while generation went on; None before the first, as the next three."""
    verify_s: float | None = None
    """Comparing them with the model, while generation went on."""
    pause_s: float | None = None
    """How long generation stood still for them, all in all."""
    load_s: float | None = None
    """The part of `pause_s` in which they were loaded and proved."""
    num_refused_snapshots: int
    """Each attempt counted."""
    num_in_service: int
    """Tickets being served now."""
    num_waiting: int
    """Tickets claimed now whose requests have not begun."""
    is_shutting_down: bool
    """It claims no more, and ends once its groups are emitted."""
    num_groups: int
    """Groups emitted."""
    num_dropped_groups: int
    """Groups given up."""
    num_verifier_failures: int
    """Times that a verifier failed or hung, whether or not a later try succeeded; the judge's too."""
    num_judge_retries: int
    """Requests of the judge that failed and were followed by another."""
    num_judge_failures: int
    """Responses that the judge could not score."""
    num_episode_failures: int
    """Times that an environment failed or hung, likewise; the next five are those of them that its process failed."""
    num_episode_deadlines: int = 0
    """It took too long."""
    num_episode_crashes: int = 0
    """It broke down."""
    num_episode_exceptions: int = 0
    """It raised."""
    num_episode_bad_replies: int = 0
    """It said what it may not: too much, no step, no reward."""
    num_episode_bad_starts: int = 0
    """There was none: its library is not there, or its row can't be sent."""
    num_sampled_tokens: int
    """Tokens that its engine sampled."""
    num_submitted_tokens: int
    """Those of them that are in emitted groups."""
    max_sequences: int
    """Requests that may be in service at once now: what the engine runs, or environments.max_in_flight."""
    num_running: int
    """Requests that the engine runs now."""
    num_engine_waiting: int
    """Requests in the engine's own queue now."""
    kv_usage: float
    """Part of the KV cache in use now, in [0, 1]."""
    kv_usage_peak: float
    """Its highest value since the served weights were loaded."""
    num_preempted: int
    """Requests thrown out of the KV cache for want of room."""

    def __post_init__(self) -> None:
        """Refuses what no engine can be like."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} must be finite and >= 0, got {value}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A process saying that it lives, and what it is doing."""

    process: str
    role: Literal["learner", "actor"]
    pid: int
    time_s: float
    version: Version | None = None
    """An actor's: the weights it serves."""
    report: ActorReport | None = None
    """An actor's; None while its engine starts."""

    def __post_init__(self) -> None:
        """Refuses a name that can't be shown, and a time that is none."""
        check_name("process", self.process)
        if not math.isfinite(self.time_s):
            raise ValueError(f"time_s must be finite, got {self.time_s}")
