"""Settings before and during vLLM's start; imports neither torch nor vllm at module level.

An engine on one GPU has two processes: vLLM's front end here, scheduler and model in a child. On a CPU vLLM would run
the model in a third process, only to bind its threads. Each process imports vLLM, which dominates startup (on one core
8 s of about 30 s CPU time). So here the model shares the scheduler's process, which gets the third one's cores and
thread count.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from absl import logging as logging_of_environment

from actor.vllm import lora_serving
from actor.vllm.compiler import do_without_compiler, engine_is_for_cpus
from bridge.liveness import report_phase
from configs.schema import Config

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from actor.vllm.convert import StatLogger


def engine_arguments(
    model_folder: pathlib.Path, config: Config, *, has_own_weights: bool, is_seeded: bool
) -> "AsyncEngineArgs":
    """Returns vLLM's arguments; the folder's weights are loaded only if they are served or the base of adapters."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    from actor.vllm import worker

    replays, on_cpu = config.model.routing_replay, current_platform.is_cpu()
    of_adapters = lora_serving.engine_arguments(config) if config.publishes_adapters else {}
    return AsyncEngineArgs(
        model=str(model_folder),
        skip_tokenizer_init=True,
        load_format=of_adapters.pop("load_format", "auto" if has_own_weights else "dummy"),
        dtype=config.model.served_dtype,
        max_model_len=config.model.max_tokens,
        max_num_seqs=config.actor.max_num_seqs,
        tensor_parallel_size=config.actor.tensor_parallel_size,
        gpu_memory_utilization=config.actor.gpu_memory_utilization,
        # A compiled model of a CPU would not call the capture that is attached after its compilation.
        enforce_eager=config.actor.enforce_eager or (replays and on_cpu),
        enable_sleep_mode=config.shares_devices and current_platform.is_sleep_mode_available(),
        enable_prefix_caching=config.actor.prefix_caching,
        # Chunked prefill resets a request's random state, which a CPU's cannot do (vLLM 0.32: the engine dies).
        enable_chunked_prefill=False if is_seeded and on_cpu else None,
        enable_return_routed_experts=replays and not on_cpu,
        **(_ROUTING_ON_CPU if replays and on_cpu else {}),
        scheduling_policy="priority",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=worker.BACKEND),
        worker_extension_cls=f"{worker.__name__}.{worker.WorkerPlugin.__name__}",
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **of_adapters,
    )


_ROUTING_ON_CPU = {
    "worker_cls": "actor.vllm.routing_capture_cpu.RoutingCpuWorker",
    "scheduler_cls": "actor.vllm.routing_capture_cpu.RoutingScheduler",
}
_UNSAFE = re.compile(r"[^\w@%+=,./-]")
"""Characters that a shell or LD_PRELOAD does not read as part of a path."""


def import_through_link(path: list[str]) -> None:
    """Replaces the entry of `path` (`sys.path`) that holds PyTorch with a symbolic link, if it is unsafe.

    vLLM puts PyTorch's OpenMP into LD_PRELOAD, which splits at spaces and colons, and TorchInductor passes PyTorch's
    folders to the compiler unquoted. Call it before PyTorch is imported. Spawned processes inherit the path.
    """
    for index, entry in enumerate(path):
        if not _UNSAFE.search(entry) or not (pathlib.Path(entry) / "torch").is_dir():
            continue
        folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        link = folder / "packages"
        link.symlink_to(pathlib.Path(entry).absolute())
        if not _UNSAFE.search(str(link)):
            path[index] = str(link)
            importlib.invalidate_caches()


def set_environment(config: Config) -> None:
    """Sets the environment variables that vLLM reads; call it before vLLM is imported."""
    # Defaults: the user's own settings have priority.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # Not forked: an actor has threads, and only spawned engines exit with it (`actor.vllm.worker.register`).
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.actor.kv_cache_gib))
    # an actor's config has only its own group; a tool's single engine uses the first
    if groups := config.actor.core_groups:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = groups[0]  # overrides an inherited value of another engine
    # No downloads and no usage reports.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["SLUICE_ENGINE"] = "1"
    if engine_is_for_cpus():
        import_through_link(sys.path)
    if line := do_without_compiler(os.environ):
        logging_of_environment.warning("%s", line)


# Part of a vLLM log message -> phase that starts with it.
PHASES = {
    "Initializing a V1 LLM engine": "engine: setting up its device",
    "Starting to load model": "engine: building the model",
    "Model loading took": "engine: measuring the memory for its cache",
    "KV cache size: %s tokens": "engine: reserving its cache",
    "Warming up model for the compilation": "engine: compiling and warming up",
    "Compiling a graph": "engine: compiling its graphs",
    "Profiling CUDA graph memory": "engine: capturing CUDA graphs",
    "init engine (profile, create kv cache, warmup model) took": "engine: ready, telling the actor",
}


class _Phases(logging.Handler):
    """Log handler that reports each startup phase once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        for part, phase in PHASES.items():
            if isinstance(record.msg, str) and part in record.msg and phase not in self._said:
                self._said.add(phase)
                report_phase(phase)


def say_phases() -> None:
    """Reports vLLM's startup phases in this process; vLLM's visible log level is unchanged. Idempotent."""
    logger = logging.getLogger("vllm")
    if any(isinstance(handler, _Phases) for handler in logger.handlers):
        return
    shown = logger.getEffectiveLevel()
    for handler in logger.handlers:
        handler.setLevel(max(handler.level, shown))
    logger.setLevel(min(shown, logging.INFO))
    logger.addHandler(_Phases())


def tune_gc() -> None:
    """Raises the garbage collection threshold from 700 to 50,000 new objects; call it before vLLM is imported.

    The import creates a million permanent objects; scanning them takes a quarter of its time.
    """
    gc.set_threshold(50_000, 20, 20)


def skip_exit_gc() -> None:
    """Skips the garbage collection at interpreter exit; the kernel frees the memory."""
    atexit.register(gc.freeze)


def start_processes(arguments: "AsyncEngineArgs", counter: "StatLogger") -> "AsyncLLM":
    """Builds the model in new processes; `counter` receives the stats of every step."""
    from vllm.v1.engine.async_llm import AsyncLLM

    class OwnedLLM(AsyncLLM):
        def __del__(self) -> None:
            """Does nothing: `VllmEngine.close` shuts down. vLLM's version may run during interpreter teardown."""

    config = engine_config(arguments)
    report_phase("engine: starting its process")
    with bound_threads(config):
        return OwnedLLM.from_vllm_config(
            config,
            stat_loggers=[lambda *_: counter],  # pyright: ignore[reportArgumentType]
            disable_log_stats=arguments.disable_log_stats,
        )


def engine_config(arguments: "AsyncEngineArgs") -> "VllmConfig":
    """Returns vLLM's configuration, with the model in the scheduler's process on a CPU without tensor parallelism."""
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if current_platform.is_cpu() and arguments.tensor_parallel_size == 1:
        arguments.distributed_executor_backend = UniProcExecutor  # given as "uni" vLLM would change it to "mp"
    return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)


@contextlib.contextmanager
def bound_threads(config: "VllmConfig") -> Iterator[None]:
    """Sets an engine's cores and threads in the environment by vLLM's own rules, on a CPU without a worker process."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    with contextlib.ExitStack() as environment:
        if config.parallel_config.distributed_executor_backend is UniProcExecutor:
            environment.enter_context(OMPProcessManager(config).configure_omp_envs(0, 0))
        yield
