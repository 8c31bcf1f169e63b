"""Which part of a snapshot's tensor a process of a tensor-parallel engine serves.

Told from what vLLM's layers say of themselves (rank, size, heads), not by its loading code: that is what is proved.

A matrix is [out, in]. Column-parallel layers hold some of its rows, row-parallel ones some of its columns, vocabulary
layers a range of rows. Keys and values have fewer heads than queries: where there are fewer than processes, several
hold the same head.
"""

from typing import Any

import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def local_part(layer: Any, number: int, tensor: torch.Tensor) -> torch.Tensor:
    """The rows that this process holds of part `number` of a layer (q, k, v; gate, up): of a matrix, or of a bias."""
    if isinstance(layer, VocabParallelEmbedding):
        held = layer.shard_indices
        return tensor[held.org_vocab_start_index : held.org_vocab_end_index]
    if not isinstance(layer, ColumnParallelLinear):
        return tensor
    num_copies = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and number > 0 else 1
    return tensor[_range(tensor.shape[0], layer.tp_rank // num_copies, layer.tp_size // num_copies)]


def local_columns(layer: Any, num_columns: int) -> tuple[int, int]:
    """The first of a matrix's columns that this process holds, and how many there are."""
    if not isinstance(layer, RowParallelLinear):
        return 0, num_columns
    held = _range(num_columns, layer.tp_rank, layer.tp_size)
    return held.start, held.stop - held.start


def expert_rows(layer: Any, num_rows: int) -> slice:
    """Which of an expert's hidden units this process holds."""
    return _range(num_rows, layer.moe_config.tp_rank, layer.moe_config.tp_size)


def _range(size: int, rank: int, among: int) -> slice:
    part, rest = divmod(size, among)
    if rest:
        raise RuntimeError(f"{size} rows can't be split over {among} processes evenly")
    return slice(rank * part, (rank + 1) * part)
