"""What vLLM is started with."""

import pathlib
from typing import TYPE_CHECKING

from actor.vllm import adapters
from configs.schema import Config

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs


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

    from actor.vllm import weights

    of_adapters = adapters.engine_arguments(config) if config.publishes_adapters else {}
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
        weight_transfer_config=WeightTransferConfig(backend=weights.BACKEND),
        worker_extension_cls=f"{weights.__name__}.{weights.WorkerPlugin.__name__}",
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **of_adapters,
    )
