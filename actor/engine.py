"""What the actor asks of an engine; `vllm_engine.VllmEngine` is the real one."""

import dataclasses
import pathlib
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int32

from bridge.types import Finish, Sampling, Version, WeightManifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response as the engine sampled it, before any verifier saw it."""

    tokens: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    """Nats, after temperature, top-p and top-k."""
    token_versions: tuple[Version, ...]
    """T entries: the weights behind each token."""
    finish: Finish


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapTimings:
    """What one weight update cost, in seconds."""

    check_s: float
    """Mapping the snapshot and comparing it with the model; generation goes on meanwhile."""
    pause_s: float
    """How long generation stood still, all in all."""
    load_s: float
    """The part of `pause_s` in which weights were loaded and proved."""


class Engine(Protocol):
    """A generation engine whose weights can be replaced while it runs."""

    @property
    def version(self) -> Version | None:
        """The weights now served; None before the first update."""
        ...

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled since the start; grows while any request makes progress."""
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
        """Checks a verified local snapshot, pauses (running requests keep their place), loads, resumes.

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
