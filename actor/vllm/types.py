"""Between the actor's types and vLLM's."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from actor.engine.partial import Part
from actor.engine.protocol import EngineDeadError
from bridge.snapshots.layout import TensorTable
from bridge.types import Sampling, Version

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def seed_of(seed: int | None, request_id: str) -> int | None:
    """A request's own seed, in [0, 2^31): the same for the same id; None without one."""
    if seed is None:
        return None
    return int.from_bytes(blake3(f"{seed}:{request_id}".encode()).digest(4), "little") >> 1


def to_params(sampling: Sampling, *, seed: int | None = None) -> "SamplingParams":
    """Parameters for one response: its whole output at the end, with the sampled tokens' logprobs.

    `seed`: the request draws by a state of its own.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed if sampling.temperature else None,  # nothing is drawn of a greedy one
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,  # the sampled token's
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_part(completion: "CompletionOutput") -> Part:
    """The tokens of one request with their logprobs and versions, whether it ended by itself or not.

    Raises:
      EngineDeadError: logprobs or versions are not those of the tokens.
    """
    num_tokens = len(completion.token_ids)
    if not num_tokens:
        return Part(tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), token_versions=())
    return Part(
        tokens=np.asarray(completion.token_ids, np.int32),
        logprobs=_sampled_logprobs(completion),
        token_versions=_token_versions(completion),
    )


def kv_sizes(config: "VllmConfig", weights: TensorTable) -> dict[str, int]:
    """`kv_tokens` and `weights_kv_tokens` of an `EngineSize`, for a decoder whose layers all keep a KV cache."""
    model, parallel = config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    kv_bytes_of_rank = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * _ITEM_BYTES[dtype]
    kv_bytes = kv_bytes_of_rank * model.get_num_layers(parallel) * parallel.tensor_parallel_size
    weights_bytes = sum(math.prod(shape) * _ITEM_BYTES[dtype] for dtype, shape in weights.values())
    return {
        "kv_tokens": config.cache_config.kv_cache_size_tokens or 0,
        "weights_kv_tokens": math.ceil(weights_bytes / kv_bytes),
    }


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
