"""The real engine: vLLM's AsyncLLM in this process, its scheduler and model in a child; no port is opened.

vLLM is imported only by `VllmEngine.start`, since it reads its environment when it is imported.
"""

import asyncio
import contextlib
import pathlib
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
"""How long the engine's processes may take to end before they are killed; torch alone needs seconds."""
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """An `actor.engine_protocol.Engine` on vLLM."""

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
        """See `start`."""
        self._llm = llm
        self._adapters = adapters
        """With publish.lora=adapter; a version is one of them then, beside weights that stay."""
        self._config = config
        self._expected = expected
        self._counter = counter
        self._size = size
        self._resumes = config.publish.at_publish == "abort_and_resume"
        self._caches_prefixes = config.actor.prefix_caching
        self._has_own_weights, self._seed = has_own_weights, seed
        self._version: Version | None = None
        self._updates = WeightUpdates(llm, config, expected=expected, counter=counter)
        self._swap_lock = asyncio.Lock()
        self._active: set[str] = set()
        """Requests whose `sample` has not returned."""
        self._aborted: set[str] = set()
        """Those of them that `abort` was called for."""

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
        """Builds the model and starts the engine's processes; takes long and blocks, so do it before a loop.

        Args:
          model_folder: of which the config alone is read, unless it has the weights that are served, or what adapters
            belong to (publish.lora=adapter).
          config: the run's.
          expected: the tensors that every snapshot must match (`actor.weights.model_folder.tensor_table`).
          base: with publish.lora=adapter the folder's tensors; `expected` are the adapters' then.
          has_own_weights: the folder's are served, from `serve_own_weights` on.
          seed: each request draws by a seed of its own, made of this one and its id; None: they share one state, so
            that what is drawn depends on what runs beside it.
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
        """The same engine for another run, after the one before has ended: no weights of its own are served yet.

        Raises:
          ValueError: the engine was started for another model or with other limits.
        """
        mine, wanted = (
            (c.model, c.actor, c.publishes_adapters and (c.lora, c.publish.max_adapters))
            for c in (self._config, config)
        )
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
        """Serves the folder's weights, as those of a version.

        Raises:
          ValueError: the engine was started without them.
        """
        if not self._has_own_weights:
            raise ValueError("the engine was started without the folder's weights; it serves snapshots")
        await self._llm.update_weight_version(str(version))
        self._version = version

    @property
    def version(self) -> Version | None:
        """The weights now served; None before the first update."""
        return self._version

    @property
    def is_dead(self) -> bool:
        """Whether its processes have ended. vLLM tells what waits for a request, not what waits for a call."""
        return self._llm.errored

    @property
    def num_requests(self) -> int:
        """Requests whose `sample` has not returned."""
        return len(self._active)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._counter.num_tokens

    @property
    def stats(self) -> EngineStats:
        """The load now, from vLLM's scheduler."""
        return self._counter.stats(is_idle=not self._llm.get_num_unfinished_requests())

    @property
    def recent_lengths(self) -> Int32[np.ndarray, "N 2"]:
        """Prompt and response tokens of the last requests that finished; a resumed one's first part is prompt."""
        return self._counter.recent_lengths()

    @property
    def size(self) -> EngineSize:
        """What it was started with."""
        return self._size

    async def sample(
        self, prompt_tokens: Int32[np.ndarray, " P"], sampling: Sampling, *, request_id: str, priority: int
    ) -> Sample:
        """Samples one response; lower priority values are scheduled first. Cancelling it aborts the request.

        Raises:
          AbortedError: the request was aborted.
          ValueError: vLLM refuses the request, or no weights were loaded yet.
          EngineDeadError: the engine is gone.
        """
        if self._version is None:
            raise ValueError("the engine has no weights of this run yet")
        parts: list[PartialSample] = []
        self._active.add(request_id)
        try:
            while True:
                await self._may_start(request_id)
                prompt, left = continuation(prompt_tokens, sampling, parts)
                with self._adapter(request_id) as adapter:
                    completion = await self._generate(
                        prompt, left, request_id=request_id, priority=priority, adapter=adapter
                    )
                reason = completion.finish_reason if completion is not None else "abort"
                if completion is not None:
                    parts.append(to_partial_sample(completion, None if adapter is None else adapter.version))
                if reason in _FINISHES:
                    return concat(parts, _FINISHES[reason])
                if reason != "abort":
                    raise EngineDeadError(f"request {request_id} ended with {reason!r}")
                is_moved = self._adapters is not None and self._adapters.moves(request_id)
                if not (self._resumes or is_moved):
                    raise AbortedError(f"request {request_id} was aborted")
        finally:
            if self._adapters is not None:
                self._adapters.moves(request_id)
            self._active.discard(request_id)
            self._aborted.discard(request_id)

    async def _may_start(self, request_id: str) -> None:
        await self._updates.is_open.wait()
        if (failure := self._updates.failure) is not None:
            raise EngineDeadError(f"request {request_id}: {failure}") from failure
        if request_id in self._aborted:
            raise AbortedError(f"request {request_id} was aborted")

    def _adapter(self, request_id: str) -> contextlib.AbstractContextManager[Adapter | None]:
        """What a request runs under from here on."""
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
        """One request of vLLM; None if it ended before there was anything of it."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        # Keyed by version: cached keys and values of older weights never serve a request made after a swap.
        # (A reset can't do it: vLLM refuses one while running requests hold blocks.)
        version = self._version if adapter is None else adapter.version
        salt = str(version) if self._caches_prefixes else None
        prompt = tokens_input(prompt_tokens.tolist(), cache_salt=salt)
        lora = None if adapter is None or self._adapters is None else self._adapters.request_of(adapter)
        output = None
        try:
            params = to_params(sampling, seed=seed_of(self._seed, request_id))
            async for one in self._llm.generate(prompt, params, request_id, lora_request=lora, priority=priority):
                output = one  # there is only the final one
        except (VllmDeadError, EngineGenerateError) as e:
            raise EngineDeadError(f"request {request_id}: the engine failed: {e or type(e).__name__}") from e
        except VLLMClientError as e:
            raise ValueError(f"request {request_id}: {e}") from e
        return output.outputs[0] if output is not None else None

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its `sample` raises AbortedError. Unknown ids are ignored."""
        if request_id in self._active:
            self._aborted.add(request_id)
        await self._llm.abort(request_id)

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Checks and stages while generating, then pauses, loads, proves, resumes; or the same for an adapter.

        Raises:
          WeightLoadError: the snapshot does not fit the model; the old weights are still served.
          EngineDeadError: the engine failed half-way and must be restarted.
        """
        async with self._swap_lock:
            if self._adapters is None:
                timings = await self._updates.swap(path, manifest)
                self._version = manifest.version
            else:
                try:
                    timings = await self._adapters.swap(path, manifest)
                finally:
                    self._version = self._adapters.version  # requests run under it, also where older could not be ended
            self._counter.start_peak()
            return timings

    async def close(self) -> None:
        """Stops the engine and its processes."""
        self._updates.close()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it would report the engine's end as a failure
        await asyncio.to_thread(self._llm.shutdown, _CLOSE_S)
