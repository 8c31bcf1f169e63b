"""`Engine` protocol, `Sample`, errors and stats; joining of partial rollouts.

With publish.at_publish=abort_and_resume a weight update aborts all requests, and each continues as a new request.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32
from msgspec import UNSET, UnsetType

from bridge.heartbeat_types import DecodeSpeed
from bridge.rollout_types import Finish, Sampling, Version
from bridge.routed_experts import RoutedExperts, extend_routing
from bridge.weight_types import WeightManifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Per-turn data of a multi-turn episode."""

    sampled: Bool[np.ndarray, " T"]
    """True where the engine sampled the token, False where the environment produced it."""
    turn_rewards: Float32[np.ndarray, " N"]
    """Rewards per turn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sampled response, not yet scored."""

    tokens: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    """Nats, after temperature, top-p and top-k; 0 for tokens that were not sampled."""
    token_versions: tuple[Version, ...]
    """Policy version of each token; T entries."""
    finish: Finish
    episode: Episode | None = None
    """Multi-turn data; None for a single response, of which every token was sampled."""
    routed_experts: RoutedExperts | UnsetType = UNSET
    """Routing of prompt and response; UNSET if not captured."""
    teacher_logprobs: Float32[np.ndarray, " T"] | UnsetType = UNSET
    """Logprobs by a teacher on a server, in nats; UNSET before it was asked, or without one."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the engine sampled."""
        return self.tokens.size if self.episode is None else int(np.count_nonzero(self.episode.sampled))

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Token range [begin, end) of each turn, that is of each run of sampled tokens."""
        if self.episode is None:
            return [(0, self.tokens.size)]
        edges = np.flatnonzero(np.diff(self.episode.sampled.astype(np.int8), prepend=0, append=0))
        return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimings:
    """Cost of one weight update, in seconds."""

    check_s: float
    """Mapping, checking and staging the snapshot; generation continues."""
    pause_s: float
    """Total time that generation was paused."""
    load_s: float
    """Part of `pause_s` spent loading and verifying weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Engine load, as counted by the engine's scheduler."""

    num_running: int
    num_waiting: int
    """Requests in the engine's own queue."""
    kv_usage: float
    """Fraction of the KV cache in use, in [0, 1]."""
    kv_usage_peak: float
    """Peak of `kv_usage` since the served weights were loaded."""
    num_preempted: int
    """Cumulative preemptions: requests evicted from the KV cache for lack of space."""
    num_finished: int
    """Cumulative responses that finished without being aborted."""
    num_sampled_tokens: int
    """Cumulative sampled tokens."""
    decode_speeds: tuple[DecodeSpeed, ...] = ()
    """Decoding steps since the engine's start, by running sequences (`ActorReport.decode_speeds`)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """Size that the engine was started with."""

    max_num_seqs: int
    tensor_parallel_size: int
    kv_tokens: int
    """KV cache capacity, in tokens."""
    weights_kv_tokens: int
    """Size of the weights, in tokens of KV cache."""


class Engine(Protocol):
    """A generation engine whose weights can be replaced while it runs."""

    @property
    def version(self) -> Version | None:
        """Version of the served weights; None before the first update."""
        ...

    @property
    def is_dead(self) -> bool:
        """True if engine processes exited unexpectedly. Calls that await them may then never return."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests whose `sample` has not returned."""
        ...

    @property
    def num_sampled_tokens(self) -> int:
        """Cumulative sampled tokens; grows while any request makes progress."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Current load."""
        ...

    @property
    def size(self) -> EngineSize:
        """Size that the engine was started with."""
        ...

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: "PartialSample | None" = None,
    ) -> Sample:
        """Samples one response. Lower priority values are scheduled first. Cancellation aborts the request.

        `begun` holds the response's first tokens, sampled before, here or elsewhere; the result includes them.

        Raises:
          AbortedError: the request was aborted; the error has what was sampled.
          ValueError: the engine cannot serve the request (prompt too long, no weights yet).
          EngineDeadError: the engine is dead; every later request fails as well.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Aborts a request; its `sample` raises AbortedError. Ignores unknown ids."""
        ...

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Updates the weights in flight: checks a verified local snapshot, pauses, loads and resumes.

        Raises:
          WeightLoadError: the snapshot does not fit the model; the old weights are still served.
          EngineDeadError: the update failed midway; the engine must be restarted.
        """
        ...

    async def sleep(self) -> None:
        """Frees the memory of its devices; no request may run. The served weights are lost."""
        ...

    async def wake_up(self) -> None:
        """Takes its memory again after `sleep`; weights must be swapped in before a request starts."""
        ...

    async def close(self) -> None:
        """Stops the engine and its processes."""
        ...


class AbortedError(RuntimeError):
    """The request was aborted before it finished."""

    def __init__(self, message: str, partial: "PartialSample | None" = None) -> None:
        super().__init__(message)
        self.partial = partial
        """Tokens sampled before the abort; None if there are none."""


class EngineDeadError(RuntimeError):
    """The engine cannot serve any more; the actor must exit and be restarted."""


class WeightLoadError(RuntimeError):
    """A snapshot does not fit the model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialSample:
    """Sampled tokens of one request, complete or not."""

    tokens: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    token_versions: tuple[Version, ...]
    routed_experts: RoutedExperts | UnsetType = UNSET
    """Routing of the request's prompt and tokens; UNSET if not captured."""

    def finished(self, finish: Finish) -> Sample:
        """Returns the response that these tokens complete."""
        return Sample(
            tokens=self.tokens,
            logprobs=self.logprobs,
            token_versions=self.token_versions,
            finish=finish,
            routed_experts=self.routed_experts,
        )


def concat(parts: Sequence[PartialSample]) -> PartialSample:
    """Returns what the requests of one response sampled, in order; at least one request."""
    return PartialSample(
        tokens=np.concatenate([p.tokens for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        token_versions=tuple(v for p in parts for v in p.token_versions),
        routed_experts=functools.reduce(extend_routing, (p.routed_experts for p in parts if p.tokens.size), UNSET),
    )


def continuation(
    prompt_tokens: Int32[np.ndarray, " P"], sampling: Sampling, parts: Sequence[PartialSample]
) -> tuple[Int32[np.ndarray, " Q"], Sampling]:
    """Returns prompt and sampling limits of the request that continues after `parts` (below `max_tokens` tokens)."""
    num_tokens = sum(p.tokens.size for p in parts)
    left = dataclasses.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_tokens,
        min_tokens=max(0, sampling.min_tokens - num_tokens),
    )
    return np.concatenate([prompt_tokens, *(p.tokens for p in parts)]), left
