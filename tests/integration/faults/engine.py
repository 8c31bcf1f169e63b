"""A small honest engine: it samples from the weights it was given, and says their logprobs and their version."""

import asyncio
import dataclasses
import pathlib
import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from actor.engine_protocol import (
    AbortedError,
    EngineSize,
    EngineStats,
    PartialSample,
    Sample,
    SwapTimings,
    WeightLoadError,
)
from bridge.rollout_types import Finish, Sampling, Version
from bridge.snapshots.snapshot_format import SnapshotError, TensorTable, check_table
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import WeightManifest
from tests.integration.faults.decoder import Shape, log_softmax, next_logits

KV_TOKENS = 1_000_000


@dataclasses.dataclass(eq=False)
class _Request:
    prompt: Int32[np.ndarray, " P"]
    sampling: Sampling
    priority: int
    done: "asyncio.Future[Finish]"
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[Version] = dataclasses.field(default_factory=list)

    @property
    def sequence(self) -> Int32[np.ndarray, " T"]:
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    @property
    def sampled(self) -> PartialSample:
        return PartialSample(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            token_versions=tuple(self.versions),
        )


class NumpyEngine:
    """Implements `actor.engine_protocol.Engine` for a tiny Qwen3; a token for each running request, again and again."""

    def __init__(
        self,
        model_folder: pathlib.Path,
        *,
        expected: TensorTable,
        max_num_seqs: int,
        token_s: float,
        reach: Callable[[str, str], object] = lambda phase, moment: None,
    ) -> None:
        """No weights yet.

        A token takes `token_s` at least; `reach` is called in the phases `generating` and `swapping`, with the moment.
        """
        self._shape = Shape.read(model_folder)
        self._expected, self._max_num_seqs, self._token_s, self._reach = expected, max_num_seqs, token_s, reach
        self._random = np.random.default_rng()
        self._weights: dict[str, np.ndarray] = {}
        self._version: Version | None = None
        self._runs = asyncio.Event()
        self._requests: dict[str, _Request] = {}
        self._decoding: asyncio.Task[None] | None = None
        self._num_tokens = self._num_finished = 0

    @property
    def version(self) -> Version | None:
        return self._version

    @property
    def is_dead(self) -> bool:
        return self._decoding is not None and self._decoding.done()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_sampled_tokens(self) -> int:
        return self._num_tokens

    @property
    def stats(self) -> EngineStats:
        running = min(len(self._requests), self._max_num_seqs)
        return EngineStats(
            num_running=running,
            num_waiting=len(self._requests) - running,
            kv_usage=0.0,
            kv_usage_peak=0.0,
            num_preempted=0,
            num_finished=self._num_finished,
            num_sampled_tokens=self._num_tokens,
        )

    @property
    def size(self) -> EngineSize:
        return EngineSize(
            max_num_seqs=self._max_num_seqs, tensor_parallel_size=1, kv_tokens=KV_TOKENS, weights_kv_tokens=1
        )

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        if self._version is None:
            raise ValueError("no weights yet")
        request = _Request(prompt_tokens, sampling, priority, asyncio.get_running_loop().create_future())
        if begun is not None:
            request.tokens += begun.tokens.tolist()
            request.logprobs += begun.logprobs.tolist()
            request.versions += begun.token_versions
        self._requests[request_id] = request
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())
        try:
            finish = await request.done
        finally:
            del self._requests[request_id]
        self._num_finished += 1
        return request.sampled.finished(finish)

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and not request.done.done():
            request.done.set_exception(AbortedError(request_id, request.sampled if request.tokens else None))

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        start = time.perf_counter()
        try:
            check_table(manifest, self._expected)
            mapped = await asyncio.to_thread(map_tensors, path, manifest)
        except SnapshotError as e:
            raise WeightLoadError(str(e)) from e
        self._reach("swapping", "begin")
        checked = time.perf_counter()
        self._runs.clear()
        for i, (name, tensor) in enumerate(mapped.items()):
            self._weights[name] = tensor.astype(np.float32)  # a copy
            if i == len(mapped) // 2:
                self._reach("swapping", "middle")
            await asyncio.sleep(0)  # what would generate meanwhile, does
        del mapped
        self._version = manifest.version
        self._reach("swapping", "end")
        self._runs.set()
        end = time.perf_counter()
        return SwapTimings(check_s=checked - start, pause_s=end - checked, load_s=end - checked)

    async def sleep(self) -> None:
        self._weights.clear()

    async def wake_up(self) -> None:
        pass

    async def close(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(self._token_s)
            await self._runs.wait()
            waiting = sorted(self._requests.values(), key=lambda r: r.priority)
            running = [r for r in waiting if not r.done.done()][: self._max_num_seqs]
            if running:
                self._step(running)
                self._reach("generating", "middle")

    def _step(self, running: list[_Request]) -> None:
        """A token for each."""
        assert self._version is not None
        logits = next_logits(self._shape, self._weights, [r.sequence for r in running])
        for request, row in zip(running, logits, strict=True):
            logprobs = log_softmax(row[None] / np.float32(request.sampling.temperature))[0]
            # Gumbel's trick: the largest of logprob + noise is a draw.
            token = int(np.argmax(logprobs + self._random.gumbel(size=logprobs.size)))
            request.tokens.append(token)
            request.logprobs.append(min(0.0, float(logprobs[token])))
            request.versions.append(self._version)
            self._num_tokens += 1
            if token in request.sampling.stop_token_ids and not request.sampling.ignore_eos:
                request.done.set_result("stop")
            elif len(request.tokens) >= request.sampling.max_tokens:
                request.done.set_result("length")
