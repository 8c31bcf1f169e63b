"""Adapter loading in vLLM's worker: from a verified snapshot in memory, with verification of the served tensors.

vLLM keeps the adapters of a layer in stacks with one slot per adapter, which its kernels read. A fused matrix (q, k, v;
gate, up) has one stack per part. With tensor parallelism a worker holds the slice of B or A for its part of the matrix.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from actor.vllm.verify_weights import local_columns, local_part, verify_served
from bridge.files import weight_files
from bridge.param_names import A, B, base_names


def load_adapter(
    model_runner: Any, number: int, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Loads an adapter under a number, and verifies it.

    Raises ValueError if vLLM rejects the adapter, and RuntimeError as `verify_adapter`.
    """
    manager = model_runner.lora_manager._adapter_manager
    helper = PEFTHelper.from_dict(dict(settings))
    helper.validate_legal(manager.lora_config)
    # Copies, because vLLM multiplies B by the scale in place, and the snapshot is mapped read-only.
    adapter = LoRAModel.from_lora_tensors(
        lora_model_id=number,
        tensors={name: tensor.clone() for name, tensor in tensors.items()},
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
    )
    manager.remove_adapter(number)
    if len(manager) >= manager.capacity:
        raise ValueError(f"{len(manager)} adapters are loaded, and the capacity is {manager.capacity}")
    manager.add_adapter(adapter)
    manager.activate_adapter(number)
    verify_adapter(manager, number, tensors, scale=helper.vllm_lora_scaling_factor)


@torch.no_grad()
def verify_adapter(manager: Any, number: int, tensors: Mapping[str, torch.Tensor], *, scale: float) -> None:
    """Compares all that the kernels read of an adapter with the snapshot; positions without a tensor must be zero.

    Raises RuntimeError if a tensor is served wrongly, or by no layer.
    """
    place = manager.lora_index_to_id.index(number)
    wanted, proved = base_names(tensors), set[str]()
    for name, layer in manager.modules.items():
        prefix, _, leaf = name.rpartition(".")
        for i, part in enumerate(manager.packed_modules_mapping.get(leaf) or [leaf]):
            module = f"{prefix}.{part}"
            names = wanted.get(module)
            stacks = {A: layer.lora_a_stacked[i][place, 0], B: layer.lora_b_stacked[i][place, 0]}
            for which, stack in stacks.items():
                want = torch.zeros_like(stack)
                if names is not None:
                    tensor = _local(layer.base_layer, i, which, tensors[names[which]].to(stack.dtype))
                    tensor = tensor * scale if which == B and scale != 1 else tensor
                    want[: tensor.shape[0], : tensor.shape[1]] = tensor.to(stack.device)
                    proved.add(names[which])
                if not torch.equal(stack, want):
                    raise RuntimeError(f"{which} of {module} is not served as it is in the snapshot")
    if unproved := sorted(tensors.keys() - proved):
        raise RuntimeError(f"{len(unproved)} tensors are served by no layer we know, first {unproved[0]}")


def verify_base(model: torch.nn.Module, folder: pathlib.Path, table: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raises RuntimeError if the base weights that vLLM read from a folder differ from the folder's tensors."""
    verify_served(model, _Folder(folder, table), seed=0)


def _local(layer: Any, number: int, which: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns this worker's slice: rows of B [out, rank] for its outputs, columns of A [rank, in] for its inputs."""
    if which == B:
        return local_part(layer, number, tensor)
    start, count = local_columns(layer, tensor.shape[1])
    return tensor[:, start : start + count]


class _Folder(Mapping[str, torch.Tensor]):
    """Tensors of a model folder in the served dtype, read on access."""

    def __init__(self, folder: pathlib.Path, table: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._table = table
        self._files = {}
        for path in weight_files(folder):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, _ = self._table[name]
        return self._files[name].get_tensor(name).to(getattr(torch, dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
