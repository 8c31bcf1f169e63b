"""An engine without a model: each token is the number that it finds in the weights it has loaded, at that moment.

Weights are loaded tensor by tensor into memory of the engine's own, generation standing still; an engine that sampled
meanwhile, or was given bytes of two versions, makes tokens that do not fit their stamps, and finds it itself.
"""

import asyncio
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from absl import logging
from jaxtyping import Int32

from actor.engine_protocol import (
    AbortedError,
    EngineDeadError,
    EngineSize,
    EngineStats,
    Sample,
    SwapTimings,
    WeightLoadError,
)
from bridge.rollout_types import Sampling, Version
from bridge.snapshots.snapshot_format import SnapshotError, TensorTable, check_table
from bridge.snapshots.verified_copy import map_tensors
from bridge.weight_types import WeightManifest
from tests.integration.network.simulated.model import number, numbers

LOGPROB = -0.5
MIXTURE = "MIXTURE of versions"
"""What an engine says that found one; no log may have it."""
Phase = Literal["prefetch", "verify", "pause", "load", "resume"]
PHASES: tuple[Phase, ...] = get_args(Phase)
DIE_AT = "SIMULATED_DIE_AT"
"""Environment variable PHASE:STEP: the process kills itself (SIGKILL) there, at the first version of that step or
later; `engine` has the last four phases, `actor` the first, where STEP counts its own downloads."""


def die_at(phase: Phase, step: int) -> None:
    """Ends this process by SIGKILL if it was told to die here."""
    wanted, _, from_step = os.environ.get(DIE_AT, "").partition(":")
    if wanted == phase and step >= int(from_step):
        os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(eq=False)
class _Request:
    num_tokens: int
    done: asyncio.Future[None]
    tokens: list[int] = dataclasses.field(default_factory=list)
    versions: list[Version] = dataclasses.field(default_factory=list)


class SimulatedEngine:
    """Implements `actor.engine_protocol.Engine`; all its requests get a token every `token_s`."""

    def __init__(self, *, expected: TensorTable, max_num_seqs: int, token_s: float, pause_s: float = 0.02) -> None:
        """No weights yet; `pause_s` is how long loading takes at least."""
        self._expected, self._max_num_seqs = expected, max_num_seqs
        self._token_s, self._pause_s = token_s, pause_s
        self._weights: dict[str, np.ndarray] = {}
        self._version: Version | None = None
        self._runs = asyncio.Event()
        self._requests: dict[str, _Request] = {}
        self._decoding: asyncio.Task[None] | None = None
        self._num_tokens = self._num_finished = 0
        self._fault: str | None = None

    @property
    def version(self) -> Version | None:
        return self._version

    @property
    def is_dead(self) -> bool:
        return self._fault is not None

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
    def recent_lengths(self) -> Int32[np.ndarray, "N 2"]:
        return np.zeros((0, 2), np.int32)

    @property
    def size(self) -> EngineSize:
        return EngineSize(
            max_num_seqs=self._max_num_seqs, tensor_parallel_size=1, kv_tokens=1_000_000, weights_kv_tokens=1
        )

    async def sample(
        self, prompt_tokens: Int32[np.ndarray, " P"], sampling: Sampling, *, request_id: str, priority: int
    ) -> Sample:
        del prompt_tokens, priority
        if self._version is None:
            raise ValueError("no weights yet")
        request = _Request(sampling.max_tokens, asyncio.get_running_loop().create_future())
        self._requests[request_id] = request
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())
        try:
            await request.done
        finally:
            del self._requests[request_id]
        self._num_finished += 1
        return Sample(
            tokens=np.array(request.tokens, np.int32),
            logprobs=np.full(len(request.tokens), LOGPROB, np.float32),
            token_versions=tuple(request.versions),
            finish="length",
        )

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and not request.done.done():
            request.done.set_exception(AbortedError(request_id))

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        start = time.perf_counter()
        try:
            check_table(manifest, self._expected)
            mapped = await asyncio.to_thread(map_tensors, path, manifest)
        except SnapshotError as e:
            raise WeightLoadError(str(e)) from e
        self._require(numbers(mapped, every=True), manifest.version, "what was fetched")
        step = manifest.version.step
        die_at("verify", step)
        checked = time.perf_counter()
        self._runs.clear()
        die_at("pause", step)
        await self._load(mapped, manifest.version)
        del mapped
        self._require(numbers(self._weights, every=True), manifest.version, "what was loaded")
        self._version = manifest.version
        die_at("resume", step)
        self._runs.set()
        end = time.perf_counter()
        return SwapTimings(check_s=checked - start, pause_s=end - checked, load_s=end - checked)

    async def close(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()

    async def _load(self, mapped: Mapping[str, np.ndarray], version: Version) -> None:
        for i, (name, tensor) in enumerate(mapped.items()):
            self._weights[name] = tensor.copy()
            if 2 * i >= len(mapped):
                die_at("load", version.step)
            await asyncio.sleep(self._pause_s / len(mapped))  # what may go wrong meanwhile does

    async def _decode(self) -> None:
        """A token for each running request, again and again."""
        while self._fault is None:
            await asyncio.sleep(self._token_s)
            await self._runs.wait()
            assert self._version is not None
            if not self._is_one(numbers(self._weights, every=False), self._version, "what is served"):
                return
            running = [r for r in self._requests.values() if not r.done.done()][: self._max_num_seqs]
            for request in running:
                # From another tensor each time: a mixture shows in the tokens themselves.
                tensor = list(self._weights.values())[len(request.tokens) % len(self._weights)]
                request.tokens.append(int(tensor[len(request.tokens) % tensor.size]))
                request.versions.append(self._version)
                self._num_tokens += 1
                if len(request.tokens) == request.num_tokens:
                    request.done.set_result(None)

    def _require(self, found: set[int], version: Version, what: str) -> None:
        if not self._is_one(found, version, what):
            raise EngineDeadError(self._fault)

    def _is_one(self, found: set[int], version: Version, what: str) -> bool:
        """Whether these numbers are the version's own; if not, all requests end and the engine is dead."""
        if found == {number(version)}:
            return True
        self._fault = f"{MIXTURE}: {what} as {version} holds the numbers {sorted(found)}"
        logging.error(self._fault)
        for request in self._requests.values():
            if not request.done.done():
                request.done.set_exception(EngineDeadError(self._fault))
        return False
