"""The real engine: vLLM's AsyncLLM in this process, its core in a child; no port is opened.

vLLM is imported only by `VllmEngine.start`, since it reads its environment when it is imported.
"""

import asyncio
import os
import pathlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int32

from actor.engine import AbortedError, EngineDeadError, Sample, SwapTimings, WeightLoadError
from bridge import codec
from bridge.snapshot_layout import SnapshotError, TensorTable, check_table
from bridge.types import Finish, Sampling, Version, WeightManifest
from configs.schema import Config

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_CLOSE_S = 15.0
"""How long the engine's processes may take to end before they are killed; torch alone needs seconds."""
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}


def set_environment(config: Config) -> None:
    """Sets what vLLM reads from the environment; call it before vLLM is imported."""
    # Plain defaults, so that a user's own setting wins.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.actor.kv_cache_gib))
    if config.actor.cpu_cores:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", config.actor.cpu_cores)
    # Nothing leaves this machine: no downloads, no usage reports.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["SLUICE_ENGINE"] = "1"


class VllmEngine:
    """An `engine.Engine` on vLLM."""

    def __init__(self, llm: "AsyncLLM", *, expected: TensorTable, counter: "_TokenCounter", config: Config) -> None:
        """See `start`."""
        self._llm = llm
        self._config = config
        self._expected = expected
        self._counter = counter
        self._recomputes = config.publish.kv_cache == "recompute"
        self._caches_prefixes = config.actor.prefix_caching
        self._version: Version | None = None
        self._is_initialized = False
        self._swap_lock = asyncio.Lock()

    @classmethod
    def start(cls, model_folder: pathlib.Path, config: Config, *, expected: TensorTable) -> "VllmEngine":
        """Loads the model and starts the engine's processes; takes long and blocks, so do it before a loop.

        `expected` is the table of tensors that every snapshot must match (`model_folder.tensor_table`).
        """
        set_environment(config)
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        from actor import vllm_weights

        class OwnedLLM(AsyncLLM):
            def __del__(self) -> None:
                """Nothing: `close` ends it. vLLM's own may run when the interpreter has half gone."""

        vllm_weights.register()
        counter = _TokenCounter()
        arguments = AsyncEngineArgs(
            model=str(model_folder),
            skip_tokenizer_init=True,
            dtype=config.model.served_dtype,
            max_model_len=config.model.max_tokens,
            max_num_seqs=config.actor.max_num_seqs,
            tensor_parallel_size=config.actor.tensor_parallel_size,
            gpu_memory_utilization=config.actor.gpu_memory_utilization,
            enforce_eager=config.actor.enforce_eager,
            enable_prefix_caching=config.actor.prefix_caching,
            scheduling_policy="priority",
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=vllm_weights.BACKEND),
            worker_extension_cls=f"{vllm_weights.__name__}.{vllm_weights.WorkerPlugin.__name__}",
            use_tqdm_on_load=False,
            disable_log_stats=True,
        )
        llm = OwnedLLM.from_engine_args(arguments, stat_loggers=[lambda *_: counter])  # pyright: ignore[reportArgumentType]
        return cls(llm, expected=expected, counter=counter, config=config)

    def for_run(self, config: Config) -> "VllmEngine":
        """The same engine for another run, after the one before has ended: no weights of its own are served yet.

        Raises:
          ValueError: the engine was started for another model or with other limits.
        """
        mine, wanted = ((c.model, c.actor) for c in (self._config, config))
        if mine != wanted:
            raise ValueError("an engine serves another run only if its sections model and actor are the same")
        return VllmEngine(self._llm, expected=self._expected, counter=self._counter, config=config)

    @property
    def version(self) -> Version | None:
        """The weights now served; None before the first update."""
        return self._version

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._counter.num_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit at once."""
        return self._llm.vllm_config.cache_config.kv_cache_size_tokens or 0

    async def sample(
        self, prompt_tokens: Int32[np.ndarray, " P"], sampling: Sampling, *, request_id: str, priority: int
    ) -> Sample:
        """Samples one response; lower priority values are scheduled first. Cancelling it aborts the request.

        Raises:
          AbortedError: the request was aborted.
          ValueError: vLLM refuses the request, or no weights were loaded yet.
          EngineDeadError: the engine is gone.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError
        from vllm.v1.engine.exceptions import EngineGenerateError

        if self._version is None:
            raise ValueError("the engine has no weights of this run yet")
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,  # the sampled token's
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # Keyed by version: cached keys and values of older weights never serve a request made after a swap.
        # (A reset can't do it: vLLM refuses one while running requests hold blocks.)
        salt = str(self._version) if self._caches_prefixes else None
        prompt = tokens_input(prompt_tokens.tolist(), cache_salt=salt)
        output = None
        try:
            async for one in self._llm.generate(prompt, params, request_id, priority=priority):
                output = one  # there is only the final one
        except (VllmDeadError, EngineGenerateError) as e:
            raise EngineDeadError(f"request {request_id}: the engine failed: {e or type(e).__name__}") from e
        except VLLMClientError as e:
            raise ValueError(f"request {request_id}: {e}") from e
        if output is None or output.outputs[0].finish_reason == "abort":
            raise AbortedError(f"request {request_id} was aborted")
        completion = output.outputs[0]
        if completion.finish_reason not in _FINISHES:
            raise EngineDeadError(f"request {request_id} ended with {completion.finish_reason!r}")
        return Sample(
            tokens=np.asarray(completion.token_ids, np.int32),
            logprobs=_sampled_logprobs(completion),
            token_versions=_token_versions(completion),
            finish=_FINISHES[completion.finish_reason],
        )

    async def abort(self, request_id: str) -> None:
        """Ends a request early; its `sample` raises AbortedError. Unknown ids are ignored."""
        await self._llm.abort(request_id)

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        """Checks while generating, then pauses, loads, proves, resumes.

        Raises:
          WeightLoadError: the snapshot does not fit the model; the old weights are still served.
          EngineDeadError: the engine failed half-way and must be restarted.
        """
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        async with self._swap_lock:
            start = time.perf_counter()
            try:
                check_table(manifest, self._expected)
                await self._initialize()
                await self._llm.start_weight_update()
                await self._call("check", path, manifest)
            except VllmDeadError as e:
                raise EngineDeadError("the engine died before a weight update") from e
            except SnapshotError as e:
                raise WeightLoadError(str(e)) from e
            except Exception as e:  # vLLM passes a worker's error on as a plain Exception
                raise WeightLoadError(f"version {manifest.version} was refused: {e}") from e
            paused = time.perf_counter()
            try:
                # `AsyncLLM.pause_generation` would sleep 20 ms more, only to let late outputs arrive first.
                await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
                load = time.perf_counter()
                await self._call("load", path, manifest)
                loaded = time.perf_counter()
                await self._llm.finish_weight_update(str(manifest.version))
                if self._recomputes:
                    await self._llm.reset_prefix_cache(reset_running_requests=True)
                await self._llm.resume_generation()
            except Exception as e:  # whatever it was, the served weights are not known any more
                raise EngineDeadError(f"version {manifest.version} failed while loading: {e}") from e
            self._version = manifest.version
            end = time.perf_counter()
            return SwapTimings(check_s=paused - start, pause_s=end - paused, load_s=loaded - load)

    async def close(self) -> None:
        """Stops the engine and its processes."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # or it would report the engine's end as a failure
        await asyncio.to_thread(self._llm.shutdown, _CLOSE_S)

    async def _initialize(self) -> None:
        if self._is_initialized:
            return
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        expected = {name: [dtype, list(shape)] for name, (dtype, shape) in self._expected.items()}
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"expected": expected}))
        self._is_initialized = True

    async def _call(self, action: str, path: pathlib.Path, manifest: WeightManifest) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        info = {"action": action, "path": str(path), "manifest": codec.encode(manifest)}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))


class _TokenCounter:
    """A vLLM stat logger (by shape) that counts sampled tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            self.num_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...


def _sampled_logprobs(completion: "CompletionOutput") -> np.ndarray:
    flat: Any = completion.logprobs  # FlatLogprobs: the sampled token comes first in each position
    starts = np.asarray(flat.start_indices)
    if not np.array_equal(np.asarray(flat.token_ids)[starts], completion.token_ids):
        raise EngineDeadError("the engine's logprobs are not those of its tokens")
    return np.asarray(flat.logprobs, np.float32)[starts]


def _token_versions(completion: "CompletionOutput") -> tuple[Version, ...]:
    versions: list[Version] = []
    for span in completion.weight_versions or ():
        versions += [Version.parse(span.version)] * (span.end - span.start)
    if len(versions) != len(completion.token_ids):
        raise EngineDeadError(f"{len(versions)} token versions for {len(completion.token_ids)} tokens")
    return tuple(versions)
