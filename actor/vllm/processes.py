"""An engine's processes: no more of them than there need be, started and ended without looking for garbage.

An engine on one GPU is two processes: vLLM's front end here, the scheduler and the model in a child. On a CPU vLLM
puts the model into a third one, only to bind its threads; each process imports vLLM anew, which takes most of the start
(on one core 8 s of CPU time, of about 30). So on a CPU the model is beside the scheduler too, and the child as a whole
gets the cores and the number of threads that vLLM would have given the third.
"""

import atexit
import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bridge.phases import say_phase

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from actor.vllm.stats import StatLogger


def collect_seldom() -> None:
    """Looks for garbage among new objects at every 50,000, not at every 700; call it before vLLM is imported.

    The import makes a million objects, which all stay: looking through them takes a quarter of its time.
    """
    gc.set_threshold(50_000, 20, 20)


def end_quickly() -> None:
    """Leaves what is there at this process's end to the kernel, without looking through it for garbage first."""
    atexit.register(gc.freeze)


def start_processes(arguments: "AsyncEngineArgs", counter: "StatLogger") -> "AsyncLLM":
    """Builds the model in them; `counter` is told of every step."""
    from vllm.v1.engine.async_llm import AsyncLLM

    class OwnedLLM(AsyncLLM):
        def __del__(self) -> None:
            """Nothing: `VllmEngine.close` ends it. vLLM's own may run when the interpreter has half gone."""

    config = engine_config(arguments)
    say_phase("engine: starting its process")
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
