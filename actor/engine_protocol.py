"""`Engine` protocol, `Sample`, errors, stats; joining partial rollouts.

With publish.at_publish=abort_and_resume a weight update ends all requests, and each goes on as a new one.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32

from bridge.rollout_types import Finish, Sampling, Version
from bridge.weight_types import WeightManifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What makes an episode of several turns more than a response of the engine."""

    sampled: Bool[np.ndarray, " T"]
    """True where the engine sampled the token; the others are the environment's."""
    turn_rewards: Float32[np.ndarray, " N"]
    """One a turn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response as the engine sampled it, before any verifier saw it."""

    tokens: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    """Nats, after temperature, top-p and top-k; 0 where not sampled."""
    token_versions: tuple[Version, ...]
    """T entries: the weights behind each token."""
    finish: Finish
    episode: Episode | None = None
    """None of a single response: all of it was sampled."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the engine sampled."""
        return self.tokens.size if self.episode is None else int(np.count_nonzero(self.episode.sampled))

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Begin and end of each turn among the tokens: of each run of sampled ones."""
        if self.episode is None:
            return [(0, self.tokens.size)]
        edges = np.flatnonzero(np.diff(self.episode.sampled.astype(np.int8), prepend=0, append=0))
        return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimings:
    """What one weight update cost, in seconds."""

    check_s: float
    """Mapping the snapshot, comparing it with the model, staging it; generation goes on meanwhile."""
    pause_s: float
    """How long generation stood still, all in all."""
    load_s: float
    """The part of `pause_s` in which weights were loaded and proved."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's load, as its own scheduler counts it."""

    num_running: int
    num_waiting: int
    """Requests in the engine's own queue."""
    kv_usage: float
    """Part of the KV cache in use, in [0, 1]."""
    kv_usage_peak: float
    """Its highest value since the served weights were loaded."""
    num_preempted: int
    """Requests thrown out of the KV cache for want of room, since the start."""
    num_finished: int
    """Responses that ended by themselves, since the start."""
    num_sampled_tokens: int
    """Since the start."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """What the engine was started with."""

    max_num_seqs: int
    tensor_parallel_size: int
    kv_tokens: int
    """Tokens whose keys and values fit at once."""
    weights_kv_tokens: int
    """The weights' size, told in tokens of KV cache."""


class Engine(Protocol):
    """A generation engine whose weights can be replaced while it runs."""

    @property
    def version(self) -> Version | None:
        """The weights now served; None before the first update."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether its processes have ended by themselves; what waits for an answer of theirs waits for ever."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests whose `sample` has not returned."""
        ...

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled since the start; grows while any request makes progress."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The load now."""
        ...

    @property
    def recent_lengths(self) -> Int32[np.ndarray, "N 2"]:
        """Prompt and response tokens of the last requests that finished."""
        ...

    @property
    def size(self) -> EngineSize:
        """What it was started with."""
        ...

    async def sample(
        self, prompt_tokens: Int32[np.ndarray, " P"], sampling: Sampling, *, request_id: str, priority: int
    ) -> Sample:
        """Samples one response; lower priority values are scheduled first. Cancelling it aborts the request.

        Raises:
          AbortedError: the request was aborted.
          ValueError: the engine can't serve such a request (prompt too long, no weights yet).
          EngineDeadError: the engine is gone; nothing can be sampled any more.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its `sample` raises AbortedError. Unknown ids are ignored."""
        ...

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Updates the weights in flight: checks a verified local snapshot, pauses, loads, resumes; requests go on.

        Raises:
          WeightLoadError: the snapshot does not fit the model; the old weights are still served.
          EngineDeadError: the engine failed half-way and must be restarted.
        """
        ...

    async def close(self) -> None:
        """Stops the engine and its processes."""
        ...


class AbortedError(RuntimeError):
    """The request was aborted before it finished."""


class EngineDeadError(RuntimeError):
    """The engine cannot serve any more; the actor must end and be started again."""


class WeightLoadError(RuntimeError):
    """A snapshot does not fit the model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartialSample:
    """Tokens of one request, complete or not."""

    tokens: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    token_versions: tuple[Version, ...]


def concat(parts: Sequence[PartialSample], finish: Finish) -> Sample:
    """One response out of the requests that made it."""
    return Sample(
        tokens=np.concatenate([p.tokens for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        token_versions=tuple(v for p in parts for v in p.token_versions),
        finish=finish,
    )


def continuation(
    prompt_tokens: Int32[np.ndarray, " P"], sampling: Sampling, parts: Sequence[PartialSample]
) -> tuple[Int32[np.ndarray, " Q"], Sampling]:
    """The prompt and the limits of the request that goes on after `parts`.

    Raises:
      ValueError: nothing is left: the parts hold `max_tokens` already.
    """
    num_tokens = sum(p.tokens.size for p in parts)
    left = dataclasses.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_tokens,
        min_tokens=max(0, sampling.min_tokens - num_tokens),
    )
    return np.concatenate([prompt_tokens, *(p.tokens for p in parts)]), left
