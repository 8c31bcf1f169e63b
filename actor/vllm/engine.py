"""vLLM engine: AsyncLLM in this process, scheduler and model in a child process; no port is opened.

Only `VllmEngine.start` imports vLLM, because vLLM reads environment variables at import.
"""

import asyncio
import contextlib
import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from actor.engine_protocol import (
    AbortedError,
    EngineDeadError,
    EngineSize,
    EngineStats,
    PartialSample,
    Sample,
    SwapTimings,
    concat,
    continuation,
)
from actor.vllm.convert import StatLogger, kv_sizes, seed_of, to_params, to_partial_sample
from actor.vllm.engine_setup import set_environment
from actor.vllm.lora_serving import Adapter, Adapters
from actor.vllm.updates import WeightUpdates
from bridge.liveness import report_phase
from bridge.rollout_types import Finish, Sampling, Version
from bridge.snapshots.snapshot_format import TensorTable
from bridge.weight_types import WeightManifest
from configs.schema import Config

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_CLOSE_S = 15.0
"""Time for engine processes to exit before they are killed, in seconds; torch alone needs several."""
_LOADS = itertools.count()
"""Numbers of weight loads in this process."""
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """`actor.engine_protocol.Engine` implemented with vLLM."""

    def __init__(
        self,
        llm: "AsyncLLM",
        *,
        expected: TensorTable,
        counter: StatLogger,
        size: EngineSize,
        config: Config,
        adapters: Adapters | None = None,
        has_own_weights: bool = False,
        seed: int | None = None,
    ) -> None:
        self._llm = llm
        self._adapters = adapters
        """Set with publish.lora=adapter: each version is an adapter, and the base weights stay."""
        self._config = config
        self._expected = expected
        self._counter = counter
        self._size = size
        self._resumes = config.publish.at_publish == "abort_and_resume"
        self._shared_as: tuple[str, str] | None = None
        self._can_sleep = llm.vllm_config.model_config.enable_sleep_mode
        self._caches_prefixes = config.actor.prefix_caching
        self._has_own_weights, self._seed = has_own_weights, seed
        self._version: Version | None = None
        self._load = next(_LOADS)
        """Number of the load that the served weights are from."""
        self._updates = WeightUpdates(llm, config, expected=expected, counter=counter)
        self._swap_lock = asyncio.Lock()
        self._active: set[str] = set()
        self._aborted: set[str] = set()
        """Active requests on which `abort` was called."""

    @classmethod
    def start(
        cls,
        model_folder: pathlib.Path,
        config: Config,
        *,
        expected: TensorTable,
        base: TensorTable | None = None,
        has_own_weights: bool = False,
        seed: int | None = None,
    ) -> "VllmEngine":
        """Builds the model and starts the engine's processes. It blocks for long, so call it before an event loop.

        Every snapshot must match the tensors `expected`. With publish.lora=adapter these are the adapters', and `base`
        has those of the folder. `has_own_weights` loads the folder's weights for `serve_own_weights`. Without a `seed`
        requests share one random state, so samples depend on concurrent requests.
        """
        set_environment(config)
        report_phase("importing vLLM")
        from actor.vllm import worker
        from actor.vllm.engine_setup import engine_arguments, start_processes

        worker.register()
        counter = StatLogger()
        arguments = engine_arguments(model_folder, config, has_own_weights=has_own_weights, is_seeded=seed is not None)
        llm = start_processes(arguments, counter)
        size = EngineSize(
            max_num_seqs=config.actor.max_num_seqs,
            tensor_parallel_size=config.actor.tensor_parallel_size,
            **kv_sizes(llm.vllm_config, base or expected),
        )
        adapters = None
        if config.publishes_adapters:
            adapters = Adapters(llm, config, expected=expected, base=base or {}, folder=model_folder)
        return cls(
            llm,
            expected=expected,
            counter=counter,
            size=size,
            config=config,
            adapters=adapters,
            has_own_weights=has_own_weights,
            seed=seed,
        )

    def for_run(self, config: Config) -> "VllmEngine":
        """Returns the engine for another run, without weights; raises ValueError if model or limits differ."""
        mine, wanted = ((c.model, c.actor, c.publishes_adapters and c.lora) for c in (self._config, config))
        if mine != wanted:
            raise ValueError("an engine serves another run only if its sections model, actor and lora are the same")
        self._updates.close()
        return VllmEngine(
            self._llm,
            expected=self._expected,
            counter=self._counter,
            size=self._size,
            config=config,
            adapters=None if self._adapters is None else self._adapters.for_run(config),
        )

    async def serve_own_weights(self, version: Version) -> None:
        """Serves the folder's weights under a version. Raises ValueError if the engine was started without them."""
        if not self._has_own_weights:
            raise ValueError("the engine was started without the folder's weights; it serves snapshots")
        await self._llm.update_weight_version(str(version))
        self._version = version

    @property
    def version(self) -> Version | None:
        """Version of the served weights; None before the first update."""
        return self._version

    @property
    def is_dead(self) -> bool:
        """True if engine processes exited. vLLM reports that to pending requests, but not to pending calls."""
        return self._llm.errored

    @property
    def num_requests(self) -> int:
        """Requests whose `sample` has not returned."""
        return len(self._active)

    @property
    def num_sampled_tokens(self) -> int:
        """Cumulative sampled tokens."""
        return self._counter.num_tokens

    @property
    def stats(self) -> EngineStats:
        """Current load, from vLLM's scheduler."""
        return self._counter.stats(is_idle=not self._llm.get_num_unfinished_requests())

    @property
    def size(self) -> EngineSize:
        """Size that the engine was started with."""
        return self._size

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        """Samples one response (`Engine.sample`); the keys and values of `begun` are computed again."""
        if self._version is None:
            raise ValueError("the engine has no weights of this run yet")
        parts = [begun] if begun is not None else []
        self._active.add(request_id)
        try:
            while True:
                await self._may_start(request_id, parts)
                prompt, left = continuation(prompt_tokens, sampling, parts)
                with self._adapter(request_id) as adapter:
                    completion = await self._generate(
                        prompt, left, request_id=request_id, priority=priority, adapter=adapter
                    )
                reason = completion.finish_reason if completion is not None else "abort"
                if completion is not None:
                    parts.append(to_partial_sample(completion, None if adapter is None else adapter.version))
                if reason in _FINISHES:
                    return concat(parts).finished(_FINISHES[reason])
                if reason != "abort":
                    raise EngineDeadError(f"request {request_id} ended with {reason!r}")
                is_moved = self._adapters is not None and self._adapters.moves(request_id)
                if not (self._resumes or is_moved):
                    raise _aborted(request_id, parts)
        finally:
            if self._adapters is not None:
                self._adapters.moves(request_id)
            self._active.discard(request_id)
            self._aborted.discard(request_id)

    async def _may_start(self, request_id: str, parts: Sequence[PartialSample]) -> None:
        await self._updates.is_open.wait()
        if (failure := self._updates.failure) is not None:
            raise EngineDeadError(f"request {request_id}: {failure}") from failure
        if request_id in self._aborted:
            raise _aborted(request_id, parts)

    def _adapter(self, request_id: str) -> contextlib.AbstractContextManager[Adapter | None]:
        return contextlib.nullcontext() if self._adapters is None else self._adapters.used_by(request_id)

    async def _generate(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        adapter: Adapter | None,
    ) -> "CompletionOutput | None":
        """Runs one vLLM request; returns None if it was aborted before any output."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        # Keyed by load, so that cached keys and values of older weights never serve a request made after a swap, also
        # not those of a version that was loaded wrongly and then again. A reset is not enough: vLLM refuses it while
        # running requests hold blocks.
        salt = str(self._load if adapter is None else adapter.version) if self._caches_prefixes else None
        prompt = tokens_input(prompt_tokens.tolist(), cache_salt=salt)
        lora = None if adapter is None or self._adapters is None else self._adapters.request_of(adapter)
        output = None
        try:
            params = to_params(sampling, seed=seed_of(self._seed, request_id))
            async for one in self._llm.generate(prompt, params, request_id, lora_request=lora, priority=priority):
                output = one  # only one, the final output
        except (VllmDeadError, EngineGenerateError) as e:
            raise EngineDeadError(f"request {request_id}: the engine failed: {e or type(e).__name__}") from e
        except VLLMClientError as e:
            raise ValueError(f"request {request_id}: {e}") from e
        return output.outputs[0] if output is not None else None

    async def abort(self, request_id: str) -> None:
        """Aborts a request; its `sample` raises AbortedError. Ignores unknown ids."""
        if request_id in self._active:
            self._aborted.add(request_id)
        await self._llm.abort(request_id)

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Updates the weights, or loads an adapter; raises as `Engine.swap_weights`."""
        async with self._swap_lock:
            if self._adapters is None:
                timings = await self._updates.swap(path, manifest)
                self._version, self._load = manifest.version, next(_LOADS)
            else:
                try:
                    timings = await self._adapters.swap(path, manifest)
                finally:
                    # new requests use it, even if older requests could not be aborted
                    self._version = self._adapters.version
            self._counter.start_peak()
            return timings

    async def share_devices(self, folder: pathlib.Path, name: str) -> None:
        """Lets the workers hold the devices that they share with a trainer, except in sleep (`bridge.device_turns`)."""
        self._shared_as = (str(folder), name)
        await self._llm.collective_rpc("hold_devices", args=self._shared_as)

    async def sleep(self) -> None:
        """Frees weights and cache (vLLM's sleep level 2); no request may run. A CPU's engine keeps its memory."""
        if self._can_sleep:
            await self._llm.sleep(level=2)
        if self._shared_as is not None:
            await self._llm.collective_rpc("release_devices")

    async def wake_up(self) -> None:
        """Takes its memory again; its contents are undefined until weights are swapped in."""
        if self._shared_as is not None:
            await self._llm.collective_rpc("hold_devices", args=self._shared_as)
        if self._can_sleep:
            await self._llm.wake_up()

    async def close(self) -> None:
        """Stops the engine and its processes."""
        self._updates.close()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # otherwise it would report the shutdown as a failure
        await asyncio.to_thread(self._llm.shutdown, _CLOSE_S)


def _aborted(request_id: str, parts: Sequence[PartialSample]) -> AbortedError:
    sampled = [part for part in parts if part.tokens.size]
    return AbortedError(f"request {request_id} was aborted", concat(sampled) if sampled else None)
