"""Settings before and while vLLM starts; imports neither torch nor vllm at module level.

On a CPU vLLM hands the path of PyTorch's OpenMP to LD_PRELOAD, which ends a path at a space or a colon, and
TorchInductor hands PyTorch's folders to the compiler without quotes.

An engine on one GPU is two processes: vLLM's front end here, the scheduler and the model in a child. On a CPU vLLM
puts the model into a third one, only to bind its threads; each process imports vLLM anew, which takes most of the start
(on one core 8 s of CPU time, of about 30). So on a CPU the model is beside the scheduler too, and the child as a whole
gets the cores and the number of threads that vLLM would have given the third.
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
    """VLLM's arguments for a run's engine; see `VllmEngine.start`.

    Nothing is sampled before the first snapshot, which has all: where the folder has weights, they are old, and are
    read only if they are served themselves or are what adapters belong to.
    """
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    from actor.vllm import worker

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
        enforce_eager=config.actor.enforce_eager,
        enable_prefix_caching=config.actor.prefix_caching,
        # A prompt in parts sets a request's random state back, which a CPU's can't be (vLLM 0.32: the engine dies).
        enable_chunked_prefill=False if is_seeded and current_platform.is_cpu() else None,
        scheduling_policy="priority",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=worker.BACKEND),
        worker_extension_cls=f"{worker.__name__}.{worker.WorkerPlugin.__name__}",
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **of_adapters,
    )


_UNSAFE = re.compile(r"[^\w@%+=,./-]")
"""Characters that a shell, LD_PRELOAD or both read as something else than a part of a path."""


def import_through_link(path: list[str]) -> None:
    """Replaces the entry that has PyTorch by a link to it, where its path has an unsafe character.

    Call it before PyTorch is imported. Processes that multiprocessing spawns have the same import path. The link is
    removed when this process ends.

    Args:
      path: `sys.path`, changed in place.
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
    """Sets what vLLM reads from the environment; call it before vLLM is imported."""
    # Defaults: a user's own setting wins.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # Not forked: an actor has threads, and a forked engine is never asked to die with it (`vllm.weights.register`).
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(config.actor.kv_cache_gib))
    if groups := config.actor.core_groups:  # an actor's config has its own alone; a tool's one engine is the first
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = groups[0]  # where it was put: another one's may be set around it
    # Nothing leaves this machine: no downloads, no usage reports.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["SLUICE_ENGINE"] = "1"
    if engine_is_for_cpus():
        import_through_link(sys.path)
    if line := do_without_compiler(os.environ):
        logging_of_environment.warning("%s", line)


# Part of what vLLM logs -> what begins then.
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
    """Says what a log record means; each once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        for part, phase in PHASES.items():
            if isinstance(record.msg, str) and part in record.msg and phase not in self._said:
                self._said.add(phase)
                report_phase(phase)


def say_phases() -> None:
    """Listens to vLLM in this process; its log shows as much as before. May be called again."""
    logger = logging.getLogger("vllm")
    if any(isinstance(handler, _Phases) for handler in logger.handlers):
        return
    shown = logger.getEffectiveLevel()
    for handler in logger.handlers:
        handler.setLevel(max(handler.level, shown))
    logger.setLevel(min(shown, logging.INFO))
    logger.addHandler(_Phases())


def tune_gc() -> None:
    """Looks for garbage among new objects at every 50,000, not at every 700; call it before vLLM is imported.

    The import makes a million objects, which all stay: looking through them takes a quarter of its time.
    """
    gc.set_threshold(50_000, 20, 20)


def skip_exit_gc() -> None:
    """Leaves what is there at this process's end to the kernel, without looking through it for garbage first."""
    atexit.register(gc.freeze)


def start_processes(arguments: "AsyncEngineArgs", counter: "StatLogger") -> "AsyncLLM":
    """Builds the model in them; `counter` is told of every step."""
    from vllm.v1.engine.async_llm import AsyncLLM

    class OwnedLLM(AsyncLLM):
        def __del__(self) -> None:
            """Nothing: `VllmEngine.close` ends it. vLLM's own may run when the interpreter has half gone."""

    config = engine_config(arguments)
    report_phase("engine: starting its process")
    with bound_threads(config):
        return OwnedLLM.from_vllm_config(
            config,
            stat_loggers=[lambda *_: counter],  # pyright: ignore[reportArgumentType]
            disable_log_stats=arguments.disable_log_stats,
        )


def engine_config(arguments: "AsyncEngineArgs") -> "VllmConfig":
    """The configuration for vLLM, with the model beside the scheduler where one process computes it."""
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if current_platform.is_cpu() and arguments.tensor_parallel_size == 1:
        arguments.distributed_executor_backend = UniProcExecutor  # given as "uni" it would be made "mp"
    return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)


@contextlib.contextmanager
def bound_threads(config: "VllmConfig") -> Iterator[None]:
    """While it is open, an engine that is started finds in its environment which cores and threads to compute with.

    Only on a CPU, and where no other process does that for it: vLLM's own rules (VLLM_CPU_OMP_THREADS_BIND).
    """
    from vllm.utils.ompmultiprocessing import OMPProcessManager
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    with contextlib.ExitStack() as environment:
        if config.parallel_config.distributed_executor_backend is UniProcExecutor:
            environment.enter_context(OMPProcessManager(config).configure_omp_envs(0, 0))
        yield
