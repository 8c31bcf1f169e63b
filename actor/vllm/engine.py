"""The real engine: vLLM's AsyncLLM in this process, its scheduler and model in a child; no port is opened.

vLLM is imported only by `VllmEngine.start`, since it reads its environment when it is imported.
"""

import asyncio
import contextlib
import pathlib
import time
from typing import TYPE_CHECKING

import numpy as np
from absl import logging
from jaxtyping import Int32

from actor.engine.partial import Part, join, rest
from actor.engine.protocol import (
    AbortedError,
    EngineDeadError,
    EngineSize,
    EngineStats,
    Sample,
    SwapTimings,
    WeightLoadError,
)
from actor.vllm.adapters import Adapter, Adapters, engine_arguments
from actor.vllm.control import Control, ControlLostError
from actor.vllm.environment import set_environment
from actor.vllm.stats import StatLogger
from actor.vllm.types import kv_sizes, read_part, seed_of, to_params
from bridge import codec
from bridge.phases import say_phase
from bridge.published import WeightManifest
from bridge.snapshots.layout import SnapshotError, TensorTable, check_table
from bridge.types import Finish, Sampling, Version
from configs.schema import Config

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_STAGE_S = 120.0
"""How long a version may take to be checked and staged."""
_CLOSE_S = 15.0
"""How long the engine's processes may take to end before they are killed; torch alone needs seconds."""
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """An `actor.engine.protocol.Engine` on vLLM."""

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
        self._recomputes = config.publish.kv_cache == "recompute"
        self._resumes = config.publish.at_publish == "abort_and_resume"
        self._caches_prefixes = config.actor.prefix_caching
        self._has_own_weights, self._seed = has_own_weights, seed
        self._version: Version | None = None
        self._control: Control | None = None
        """Its processes, asked past its steps; from the first update on."""
        self._swap_lock = asyncio.Lock()
        self._active: set[str] = set()
        """Requests whose `sample` has not returned."""
        self._aborted: set[str] = set()
        """Those of them that `abort` was called for."""
        self._is_open = asyncio.Event()
        """Cleared while requests were ended for a swap: none may start before the new weights are there."""
        self._is_open.set()
        self._failure: EngineDeadError | None = None

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
        say_phase("importing vLLM")
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from actor.vllm import weights
        from actor.vllm.processes import bound_threads, engine_config

        class OwnedLLM(AsyncLLM):
            def __del__(self) -> None:
                """Nothing: `close` ends it. vLLM's own may run when the interpreter has half gone."""

        weights.register()
        counter = StatLogger()
        of_adapters = engine_arguments(config) if config.publishes_adapters else {}
        # Nothing is sampled before the first snapshot, which has all: where the folder has weights, they are old.
        load_format = of_adapters.pop("load_format", "auto" if has_own_weights else "dummy")
        arguments = AsyncEngineArgs(
            model=str(model_folder),
            skip_tokenizer_init=True,
            load_format=load_format,
            dtype=config.model.served_dtype,
            max_model_len=config.model.max_tokens,
            max_num_seqs=config.actor.max_num_seqs,
            tensor_parallel_size=config.actor.tensor_parallel_size,
            gpu_memory_utilization=config.actor.gpu_memory_utilization,
            enforce_eager=config.actor.enforce_eager,
            enable_prefix_caching=config.actor.prefix_caching,
            # A prompt in parts sets a request's random state back, which a CPU's can't be (vLLM 0.32: the engine dies).
            enable_chunked_prefill=False if seed is not None and current_platform.is_cpu() else None,
            scheduling_policy="priority",
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=weights.BACKEND),
            worker_extension_cls=f"{weights.__name__}.{weights.WorkerPlugin.__name__}",
            use_tqdm_on_load=False,
            disable_log_stats=True,
            **of_adapters,
        )
        vllm_config = engine_config(arguments)
        say_phase("engine: starting its process")
        with bound_threads(vllm_config):
            llm = OwnedLLM.from_vllm_config(
                vllm_config,
                stat_loggers=[lambda *_: counter],  # pyright: ignore[reportArgumentType]
                disable_log_stats=arguments.disable_log_stats,
            )
        size = EngineSize(
            max_num_seqs=config.actor.max_num_seqs,
            tensor_parallel_size=config.actor.tensor_parallel_size,
            **kv_sizes(llm.vllm_config, base or expected),
        )
        adapters = None
        if of_adapters:
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
        if self._control is not None:
            self._control.close()
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
        parts: list[Part] = []
        self._active.add(request_id)
        try:
            while True:
                await self._may_start(request_id)
                prompt, left = rest(prompt_tokens, sampling, parts)
                with self._adapter(request_id) as adapter:
                    completion = await self._generate(
                        prompt, left, request_id=request_id, priority=priority, adapter=adapter
                    )
                reason = completion.finish_reason if completion is not None else "abort"
                if completion is not None:
                    parts.append(read_part(completion, None if adapter is None else adapter.version))
                if reason in _FINISHES:
                    return join(parts, _FINISHES[reason])
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
        await self._is_open.wait()
        if self._failure is not None:
            raise EngineDeadError(f"request {request_id}: {self._failure}") from self._failure
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
        """Checks and stages while generating, then pauses, loads, proves, resumes.

        Raises:
          WeightLoadError: the snapshot does not fit the model; the old weights are still served.
          EngineDeadError: the engine failed half-way and must be restarted.
        """
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        async with self._swap_lock:
            if self._adapters is not None:
                return await self._swap_adapter(self._adapters, path, manifest)
            start = time.perf_counter()
            try:
                check_table(manifest, self._expected)
                await self._initialize()
                await self._prepare(path, manifest)
            except (VllmDeadError, ControlLostError) as e:
                raise EngineDeadError(f"the engine died before a weight update: {e}") from e
            except SnapshotError as e:
                raise WeightLoadError(str(e)) from e
            except Exception as e:  # vLLM passes a worker's error on as a plain Exception
                raise WeightLoadError(f"version {manifest.version} was refused: {e}") from e
            paused = time.perf_counter()
            try:
                load_s = await self._load(path, manifest)
            except BaseException as e:  # whatever it was, the served weights are not known any more
                self._failure = EngineDeadError(f"version {manifest.version} failed while loading: {e}")
                if not isinstance(e, Exception):
                    raise
                raise self._failure from e
            finally:
                self._is_open.set()
            return SwapTimings(check_s=paused - start, pause_s=time.perf_counter() - paused, load_s=load_s)

    async def _swap_adapter(self, adapters: Adapters, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        try:
            timings = await adapters.swap(path, manifest)
        finally:
            self._version = adapters.version  # requests run under it, also where older ones could not be ended
        self._counter.start_peak()
        return timings

    async def _load(self, path: pathlib.Path, manifest: WeightManifest) -> float:
        """Pauses, loads, proves, resumes; returns the seconds that loading took.

        With abort_and_resume all requests end here, what is queued in the engine too: vLLM sends what they have after
        all of their tokens, `sample` keeps it and starts them again once the new weights serve. No request is left, so
        the prompt cache can be dropped: one that was on its way to the engine starts with an empty one.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        # `AsyncLLM.pause_generation` would sleep 20 ms more, only to let late outputs arrive first.
        if self._resumes:
            self._is_open.clear()
            await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)
        else:
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        start = time.perf_counter()
        await self._llm.start_weight_update()
        info = {"path": str(path), "manifest": codec.encode(manifest)}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        load_s = time.perf_counter() - start
        await self._llm.finish_weight_update(str(manifest.version))
        if self._recomputes:
            self._counter.forgive_running()
            await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._llm.resume_generation()
        self._version = manifest.version
        self._counter.start_peak()
        return load_s

    async def close(self) -> None:
        """Stops the engine and its processes."""
        if self._control is not None:
            self._control.close()
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it would report the engine's end as a failure
        await asyncio.to_thread(self._llm.shutdown, _CLOSE_S)

    async def _initialize(self) -> None:
        if self._control is not None:
            return
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        expected = {name: [dtype, list(shape)] for name, (dtype, shape) in self._expected.items()}
        control = Control()
        try:
            info = {"expected": expected, "control": control.address}
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            await asyncio.to_thread(control.connect, self._size.tensor_parallel_size)
        except BaseException:
            control.close()
            raise
        self._control = control

    async def _prepare(self, path: pathlib.Path, manifest: WeightManifest) -> None:
        """Has the snapshot checked and staged by all of the engine's processes, past its steps."""
        assert self._control is not None
        message = str(path), codec.encode(manifest)
        try:
            said = await asyncio.to_thread(self._control.ask, *message, timeout_s=_STAGE_S)
        except TimeoutError:  # then it is loaded in the pause
            logging.warning("version %s was not staged within %.0f s", manifest.version, _STAGE_S)
            return
        if refusals := [refusal for refusal in said if refusal]:
            await self._llm.collective_rpc("drop_snapshot")  # others of its processes may hold the file
            raise SnapshotError(f"version {manifest.version} was refused: {refusals[0]}")
