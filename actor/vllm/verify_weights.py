"""Verification of served weights against the snapshot, including tensor parallel and MoE layers.

It relies on attributes of vLLM's layers (rank, size, heads), not on vLLM's loading code, which is what it verifies.

A matrix is [out, in]. Column-parallel layers hold some of its rows, row-parallel layers some of its columns, vocabulary
layers a range of rows. With fewer key-value heads than processes, several processes hold the same head.

A matrix is tested through the kernel that serves it, because on a CPU the parameter itself is repacked. Its product
with unit vectors must equal the snapshot's columns bit for bit, since all other summands are zero. Embeddings, norms
and biases are compared directly. Tested rows and columns change per update and include the first and the last. With
tensor parallelism each process verifies its own part, before the reduction over processes.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding


def local_part(layer: Any, number: int, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a matrix or bias that this process holds of part `number` of a layer (q, k, v; gate, up)."""
    if isinstance(layer, VocabParallelEmbedding):
        held = layer.shard_indices
        return tensor[held.org_vocab_start_index : held.org_vocab_end_index]
    if not isinstance(layer, ColumnParallelLinear):
        return tensor
    num_copies = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and number > 0 else 1
    return tensor[_range(tensor.shape[0], layer.tp_rank // num_copies, layer.tp_size // num_copies)]


def local_columns(layer: Any, num_columns: int) -> tuple[int, int]:
    """Returns the first column of a matrix that this process holds, and the number of columns."""
    if not isinstance(layer, RowParallelLinear):
        return 0, num_columns
    held = _range(num_columns, layer.tp_rank, layer.tp_size)
    return held.start, held.stop - held.start


def expert_rows(layer: Any, num_rows: int) -> slice:
    """Returns the range of an expert's hidden units that this process holds."""
    return _range(num_rows, layer.moe_config.tp_rank, layer.moe_config.tp_size)


def _range(size: int, rank: int, among: int) -> slice:
    part, rest = divmod(size, among)
    if rest:
        raise RuntimeError(f"{size} rows cannot be split evenly over {among} processes")
    return slice(rank * part, (rank + 1) * part)


_PROBED_COLUMNS = 4
_PROBED_ROWS = 64
_PROBED_EXPERT_ROWS = 4
_PLAIN_EXPERTS = ("CPU", "TRITON", "BATCHED_TRITON")
"""vLLM backends that hold experts unpacked (the CPU backend packs them after verification)."""


logger = logging.getLogger(f"vllm.{__name__}")


def verify_served(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, seed: int) -> None:
    """Raises RuntimeError if this process's part of the model differs from the snapshot, or a tensor has no layer."""
    proof = _Verification(model, tensors, seed)
    for full_name, layer in model.named_modules():
        module: Any = layer  # attributes depend on its class
        name = full_name.removesuffix(".base_layer")  # adapters wrap the base layer
        if isinstance(module, LinearBase | ParallelLMHead):
            proof.matrix(name, module)
        elif isinstance(module, VocabParallelEmbedding):
            proof.embedding(name, module)
        elif has_experts(module):
            proof.experts(name, module)
        elif not any(module.children()) and f"{name}.weight" in tensors:
            proof.scale(name, module)
    if unproved := sorted(tensors.keys() - proof.proved):
        raise RuntimeError(f"{len(unproved)} tensors are served by no layer we know, first {unproved[0]}")


def has_experts(module: torch.nn.Module) -> bool:
    """Returns True if a layer holds a MoE's experts."""
    return hasattr(module, "w13_weight") and hasattr(module, "w2_weight")


def expert_prefixes(model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the name prefixes of the experts' tensors in a snapshot."""
    return tuple(_expert_prefix(name) + "." for name, layer in model.named_modules() if has_experts(layer))


def _expert_prefix(module_name: str) -> str:
    return module_name.removesuffix(".routed_experts")


class _Verification:
    """Verification pass that records the verified tensors."""

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], seed: int) -> None:
        self._model, self._tensors, self._seed = model, tensors, seed
        self._fused = getattr(model, "packed_modules_mapping", {})
        self.proved: set[str] = set()

    def matrix(self, name: str, layer: Any) -> None:
        """Verifies a matrix [out, in], possibly of parts fused along the rows, and its bias."""
        weights = self._parts(name, "weight")
        start, num_inputs = local_columns(layer, weights[0].shape[1])
        columns = self._spread(num_inputs, _PROBED_COLUMNS)
        device = next(self._model.parameters()).device
        units = torch.zeros(len(columns), num_inputs, dtype=weights[0].dtype, device=device)
        units[torch.arange(len(columns)), columns] = 1
        local = [local_part(layer, i, w) for i, w in enumerate(weights)]
        want = torch.cat([w[:, start + columns] for w in local]).T
        got = layer.quant_method.apply(layer, units, None)
        self._compare(name, got[:, : want.shape[1]], want)  # a head is padded
        if getattr(layer, "bias", None) is not None and isinstance(layer, LinearBase):
            biases = [local_part(layer, i, b) for i, b in enumerate(self._parts(name, "bias"))]
            self._compare(f"{name}.bias", layer.bias, torch.cat(biases))

    def embedding(self, name: str, layer: Any) -> None:
        """Verifies some rows of an embedding [vocabulary, D]."""
        (weight,) = self._parts(name, "weight")
        local = local_part(layer, 0, weight)
        rows = self._spread(local.shape[0], _PROBED_ROWS)
        self._compare(name, layer.weight[rows], local[rows])

    def scale(self, name: str, layer: Any) -> None:
        """Verifies a norm's scale, which every process holds in full."""
        (weight,) = self._parts(name, "weight")
        self._compare(name, layer.weight, weight)

    def experts(self, name: str, layer: Any) -> None:
        """Verifies the same rows of all experts; vLLM holds gate and up as [experts, 2 F, D], down as [experts, D, F].

        Some GPU kernels shuffle experts. Only the learner's probe verifies those.
        """
        prefix = _expert_prefix(name)
        gate_up, down = layer.w13_weight, layer.w2_weight
        backend = getattr(layer.quant_method, "unquantized_backend", None)
        if getattr(backend, "name", "") not in _PLAIN_EXPERTS:
            logger.warning("experts served by %s are proved by the learner's probe only", backend)
            self.proved.update(key for key in self._tensors if key.startswith(f"{prefix}."))
            return
        keys = {
            part: [f"{prefix}.{i}.{part}_proj.weight" for i in range(gate_up.shape[0])]
            for part in ("gate", "up", "down")
        }
        mine = expert_rows(layer, self._tensors[keys["gate"][0]].shape[0])
        size = mine.stop - mine.start
        rows = self._spread(size, _PROBED_EXPERT_ROWS)
        # One comparison per part: on a GPU each costs a copy and a synchronization, and this is in the pause.
        for number, part in enumerate(("gate", "up")):
            want = torch.stack([self._tensors[key][mine].index_select(0, rows) for key in keys[part]])
            self._compare(f"{prefix}.*.{part}_proj.weight", gate_up[:, number * size + rows, : want.shape[2]], want)
        rows = self._spread(self._tensors[keys["down"][0]].shape[0], _PROBED_EXPERT_ROWS)
        want = torch.stack([self._tensors[key][:, mine].index_select(0, rows) for key in keys["down"]])
        self._compare(f"{prefix}.*.down_proj.weight", down[:, rows, : want.shape[2]], want)
        self.proved.update(*keys.values())

    def _parts(self, module_name: str, kind: str) -> list[torch.Tensor]:
        prefix, _, leaf = module_name.rpartition(".")
        prefix = prefix and prefix + "."
        names = [f"{prefix}{part}.{kind}" for part in self._fused.get(leaf, [leaf])]
        if names == ["lm_head.weight"] and names[0] not in self._tensors:
            names = ["model.embed_tokens.weight"]
        self.proved.update(names)
        return [self._tensors[name] for name in names]

    def _compare(self, name: str, got: Any, want: torch.Tensor) -> None:
        want = want.to(device=got.device, dtype=got.dtype)
        if got.shape != want.shape or not torch.equal(got, want):
            raise RuntimeError(f"{name} is not served as it is in the snapshot (shape {tuple(got.shape)})")

    def _spread(self, size: int, number: int) -> torch.Tensor:
        """Returns some distinct indices below `size`, including the first and the last."""
        some = np.random.default_rng(self._seed).integers(0, size, number)
        return torch.from_numpy(np.unique(np.concatenate([[0, size - 1], some])))
