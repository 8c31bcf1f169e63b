"""An engine without a model: responses are made up, and end when the test says so."""

import asyncio
import dataclasses
import pathlib

import numpy as np

from actor.engine_protocol import (
    AbortedError,
    EngineDeadError,
    EngineSize,
    EngineStats,
    PartialSample,
    Sample,
    SwapTimings,
    WeightLoadError,
)
from bridge.heartbeat_types import DecodeSpeed
from bridge.rollout_types import Finish, Sampling, Version
from bridge.weight_types import WeightManifest


@dataclasses.dataclass
class Request:
    prompt_tokens: np.ndarray
    sampling: Sampling
    priority: int
    versions: list[Version]
    """Of the tokens so far."""
    done: asyncio.Future[None]


class FakeEngine:
    """Implements `actor.engine_protocol.Engine`; with `auto` it answers at once."""

    def __init__(self, *, auto: bool = False, reply: bytes = b"42") -> None:
        self.auto, self.reply = auto, np.frombuffer(reply, np.uint8).astype(np.int32)
        self.ends_by: Finish = "stop"
        """What all its responses end by."""
        self.version: Version | None = None
        self.num_sampled_tokens = 0
        self.is_dead = False
        self.running: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.swapped: list[Version] = []
        self.refuse: set[Version] = set()
        self.hang_swaps = False
        self.abort_ends: asyncio.Event | None = None
        """When set, an abort takes until this event."""
        self.is_closed = self.is_asleep = False
        self.num_finished = 0
        self.num_preempted = 0
        """Set by the test, as are the next four."""
        self.decode_speeds: tuple[DecodeSpeed, ...] = ()
        self.kv_usage = 0.0
        self.size = EngineSize(max_num_seqs=8, tensor_parallel_size=1, kv_tokens=1000, weights_kv_tokens=100)

    @property
    def num_requests(self) -> int:
        return len(self.running)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            kv_usage=self.kv_usage,
            kv_usage_peak=self.kv_usage,
            num_preempted=self.num_preempted,
            num_finished=self.num_finished,
            num_sampled_tokens=self.num_sampled_tokens,
            decode_speeds=self.decode_speeds,
        )

    async def sample(
        self,
        prompt_tokens: np.ndarray,
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        assert self.version is not None
        done = asyncio.get_running_loop().create_future()
        versions = [] if begun is None else list(begun.token_versions)
        request = Request(prompt_tokens, sampling, priority, versions, done)
        self.running[request_id] = request
        try:
            if self.auto:
                self.step(request_id, self.reply.size)
                await asyncio.sleep(0)
            else:
                await done
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            if self.abort_ends is not None:
                await self.abort_ends.wait()
            raise
        finally:
            del self.running[request_id]
        self.num_finished += 1
        return self._sampled(request).finished(self.ends_by)

    def _sampled(self, request: Request) -> PartialSample:
        size = len(request.versions)
        return PartialSample(
            tokens=np.resize(self.reply, size),
            logprobs=np.full(size, -0.5, np.float32),
            token_versions=tuple(request.versions),
        )

    def step(self, request_id: str, num_tokens: int = 1) -> None:
        """Samples tokens for a request with the weights now served."""
        assert self.version is not None
        self.running[request_id].versions += [self.version] * num_tokens
        self.num_sampled_tokens += num_tokens

    def finish(self, request_id: str) -> None:
        """Ends a request, after a first pass over the reply if it has no token yet."""
        if not self.running[request_id].versions:
            self.step(request_id, self.reply.size)
        self.running[request_id].done.set_result(None)

    def die(self) -> None:
        for request in self.running.values():
            request.done.set_exception(EngineDeadError("the fake engine died"))

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            request = self.running[request_id]
            partial = self._sampled(request) if request.versions else None
            request.done.set_exception(AbortedError(request_id, partial))

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        if self.hang_swaps:
            await asyncio.Event().wait()
        if manifest.version in self.refuse:
            raise WeightLoadError(f"no {manifest.version}")
        self.version = manifest.version
        self.swapped.append(manifest.version)
        return SwapTimings(check_s=0.001, pause_s=0.02, load_s=0.01)

    async def sleep(self) -> None:
        self.is_asleep = True

    async def wake_up(self) -> None:
        self.is_asleep = False

    async def close(self) -> None:
        self.is_closed = True


async def until(condition, what: str, *, deadline_s: float = 60.0) -> None:
    """Lets the loop run until the condition holds; fails the test if it never does."""
    end = asyncio.get_running_loop().time() + deadline_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"{what}: not within {deadline_s} s"
        await asyncio.sleep(0.001)
