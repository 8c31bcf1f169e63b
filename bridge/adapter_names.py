"""Low-rank adapters under both names: Flax paths, and the names that PEFT and vLLM know.

An adapter of the matrix `layers/q_proj/kernel`, [layers, out, in], is two leaves: `layers/q_proj/lora_a`, [layers,
rank, in], and `layers/q_proj/lora_b`, [layers, out, rank]. A slice of one is a tensor of PEFT's, in its layout.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from bridge.names import ParamNames, flatten, unflatten

A, B = "lora_a", "lora_b"
_PREFIX = "base_model.model."
_WEIGHT = ".weight"
_PEFT = {A: ".lora_A.weight", B: ".lora_B.weight"}


class TensorNames(Protocol):
    """The leaves that a snapshot is made of, under both names: a model's, or its adapters'."""

    def paths(self) -> tuple[str, ...]:
        """Every Flax path."""
        ...

    def stack(self, path: str) -> tuple[int, ...]:
        """The leading dims that count tensors."""
        ...

    def hf_names(self, path: str) -> tuple[str, ...]:
        """The tensors behind one leaf, in the order of its slices."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNames:
    """The adapters of some of a model's matrices."""

    model: ParamNames
    modules: tuple[str, ...]
    """The matrices that have one, as in `LoraConfig.modules`."""

    def paths(self) -> tuple[str, ...]:
        """Every Flax path."""
        return tuple(f"layers/{module}/{part}" for module in self.modules for part in (A, B))

    def stack(self, path: str) -> tuple[int, ...]:
        """The leading dims that count tensors: (layers,)."""
        return self.model.stack(_kernel(path))

    def hf_names(self, path: str) -> tuple[str, ...]:
        """PEFT's names of a leaf's slices."""
        part = path.rpartition("/")[2]
        return tuple(adapter_tensor(name, part) for name in self.model.hf_names(_kernel(path)))


def adapter_tensor(weight: str, part: str) -> str:
    """PEFT's name of `lora_a` or `lora_b` of a matrix: model.layers.0.mlp.up_proj.weight -> base_model.model. ..."""
    return _PREFIX + weight.removesuffix(_WEIGHT) + _PEFT[part]


def adapter_table(
    table: Mapping[str, tuple[str, tuple[int, ...]]], *, modules: tuple[str, ...], rank: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The adapters' tensors, name -> (dtype, shape), told from a model's own.

    Raises:
      ValueError: the model has no such matrix.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for module in modules:
        names = [name for name in table if name.endswith(f".{module}{_WEIGHT}") and ".experts." not in name]
        if not names:
            raise ValueError(f"lora.targets: the model has no {module}; leave {module.removesuffix('_proj')} out")
        for name in names:
            dtype, (num_out, num_in) = table[name]
            found[adapter_tensor(name, A)] = (dtype, (rank, num_in))
            found[adapter_tensor(name, B)] = (dtype, (num_out, rank))
    return found


def base_names(tensors: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """The matrices that some adapters' tensors belong to: vLLM's module name -> {lora_a: tensor, lora_b: tensor}."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        for part, suffix in _PEFT.items():
            if name.startswith(_PREFIX) and name.endswith(suffix):
                found.setdefault(name.removeprefix(_PREFIX).removesuffix(suffix), {})[part] = name
    return found


def combine(base: Mapping[str, object], adapters: Mapping[str, object]) -> dict[str, object]:
    """One tree of both: what applies them."""
    return unflatten(flatten(base) | flatten(adapters))


def _kernel(path: str) -> str:
    return path.rpartition("/")[0] + "/kernel"
