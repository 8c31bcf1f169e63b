"""In vLLM's worker: an adapter taken out of a verified snapshot in memory, and the proof that it is what is served.

vLLM keeps the adapters of a layer in stacks, one place for each, out of which its kernels read; a matrix of several
(q, k, v; gate, up) has a stack for each. With tensor parallelism a worker holds the part of B, or of A, that belongs to
its part of the matrix.
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
    """Puts an adapter into the engine under a number, and proves it.

    Raises:
      RuntimeError: it is not served as it is in the snapshot.
      ValueError: vLLM does not take it.
    """
    manager = model_runner.lora_manager._adapter_manager
    helper = PEFTHelper.from_dict(dict(settings))
    helper.validate_legal(manager.lora_config)
    # Copies: vLLM multiplies B with the scale in place, and the snapshot is mapped to be read.
    adapter = LoRAModel.from_lora_tensors(
        lora_model_id=number,
        tensors={name: tensor.clone() for name, tensor in tensors.items()},
        peft_helper=helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
    )
    manager.remove_adapter(number)
    if len(manager) >= manager.capacity:
        raise ValueError(f"{len(manager)} adapters are there already, and there is room for {manager.capacity}")
    manager.add_adapter(adapter)
    manager.activate_adapter(number)
    verify_adapter(manager, number, tensors, scale=helper.vllm_lora_scaling_factor)


@torch.no_grad()
def verify_adapter(manager: Any, number: int, tensors: Mapping[str, torch.Tensor], *, scale: float) -> None:
    """Compares all that the kernels read of an adapter with the snapshot, zeros where it has nothing.

    Raises:
      RuntimeError: a tensor is not served as it is in the snapshot, or by no layer.
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
    """Compares the base that vLLM has read from a folder with the folder's own tensors.

    Raises:
      RuntimeError: it serves something else.
    """
    verify_served(model, _Folder(folder, table), seed=0)


def _local(layer: Any, number: int, which: str, tensor: torch.Tensor) -> torch.Tensor:
    """What this worker holds: of B [out, rank] the rows of its outputs, of A [rank, in] the columns of its inputs."""
    if which == B:
        return local_part(layer, number, tensor)
    start, count = local_columns(layer, tensor.shape[1])
    return tensor[:, start : start + count]


class _Folder(Mapping[str, torch.Tensor]):
    """A model folder's tensors in the served dtype, read one at a time."""

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
