"""Learner parameter paths <-> Hugging Face and PEFT tensor names.

The learner stacks one kind of tensor over layers, `[layers, ...]`, and MoE expert tensors also over experts, `[layers,
experts, ...]`. The remaining dims keep Hugging Face's layout (`[out, in]` for a kernel). A Hugging Face tensor is
therefore a whole leaf or one contiguous slice of a leaf, and nothing is ever transposed. Families differ in which
tensors exist. Most names are shared, and a family defines the others in `own_names`.

Pure Python without numpy or JAX: a leaf is any object where `leaf[layer]` is a layer and `leaf[layer][expert]` an
expert.

The adapter of `layers/q_proj/kernel`, [layers, out, in], has two leaves: `layers/q_proj/lora_a`, [layers, rank, in],
and `layers/q_proj/lora_b`, [layers, out, rank]. A slice of an adapter leaf is a PEFT tensor in PEFT's layout.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Protocol, cast

STACKED_PREFIX = "layers/"
EXPERTS_PREFIX = "layers/experts_"


_HEAD_PATH = "lm_head/kernel"
_WHOLE = {
    "embed/embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    _HEAD_PATH: "lm_head.weight",
}
_IN_LAYER = {
    "layers/input_norm/scale": "input_layernorm.weight",
    "layers/q_proj/kernel": "self_attn.q_proj.weight",
    "layers/q_proj/bias": "self_attn.q_proj.bias",
    "layers/k_proj/kernel": "self_attn.k_proj.weight",
    "layers/k_proj/bias": "self_attn.k_proj.bias",
    "layers/v_proj/kernel": "self_attn.v_proj.weight",
    "layers/v_proj/bias": "self_attn.v_proj.bias",
    "layers/q_norm/scale": "self_attn.q_norm.weight",
    "layers/k_norm/scale": "self_attn.k_norm.weight",
    "layers/o_proj/kernel": "self_attn.o_proj.weight",
    "layers/o_proj/bias": "self_attn.o_proj.bias",
    "layers/post_norm/scale": "post_attention_layernorm.weight",
    "layers/gate_proj/kernel": "mlp.gate_proj.weight",
    "layers/gate_proj/bias": "mlp.gate_proj.bias",
    "layers/up_proj/kernel": "mlp.up_proj.weight",
    "layers/up_proj/bias": "mlp.up_proj.bias",
    "layers/down_proj/kernel": "mlp.down_proj.weight",
    "layers/down_proj/bias": "mlp.down_proj.bias",
    "layers/router/kernel": "mlp.gate.weight",
}
_IN_EXPERT = {
    "layers/experts_gate/kernel": "gate_proj.weight",
    "layers/experts_up/kernel": "up_proj.weight",
    "layers/experts_down/kernel": "down_proj.weight",
}
_QKV_BIAS = frozenset({"layers/q_proj/bias", "layers/k_proj/bias", "layers/v_proj/bias"})
_QK_NORM = frozenset({"layers/q_norm/scale", "layers/k_norm/scale"})
_MLP_BIAS = frozenset({"layers/gate_proj/bias", "layers/up_proj/bias", "layers/down_proj/bias"})
_DENSE = frozenset({"layers/gate_proj/kernel", "layers/up_proj/kernel", "layers/down_proj/kernel"})
_MOE = frozenset({"layers/router/kernel", *_IN_EXPERT})
_NUMBER = "(0|[1-9][0-9]*)"
_HF_LAYER = re.compile(rf"model\.layers\.{_NUMBER}\.(.+)")
_HF_EXPERT = re.compile(rf"mlp\.experts\.{_NUMBER}\.(.+)")
_PATH_IN_EXPERT = {suffix: path for path, suffix in _IN_EXPERT.items()}
_PATH_OF_WHOLE = {name: path for path, name in _WHOLE.items()}


def is_stacked(path: str) -> bool:
    """Returns True if the first dim of the leaf at `path` counts layers."""
    return path.startswith(STACKED_PREFIX)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamNames:
    """Parameter names of one model, in the learner and in Hugging Face."""

    num_layers: int
    tie_word_embeddings: bool
    """True if the output head is the embedding, so that neither side has `lm_head`."""
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    mlp_bias: bool = False
    num_experts: int = 0
    """Experts per layer; 0 is a dense model, whose layers have one MLP and no router."""
    own_names: tuple[tuple[str, str], ...] = ()
    """(path, Hugging Face name within a layer) of tensors that only this family has or names differently."""

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be >= 1, got {self.num_layers}")
        if self.num_experts < 0:
            raise ValueError(f"num_experts must be >= 0, got {self.num_experts}")

    def paths(self) -> tuple[str, ...]:
        """Returns every Flax path of this model: embedding, layer leaves, final norm, head."""
        layer_paths = (path for path in (*self._in_layer, *_IN_EXPERT) if self._has(path))
        head = () if self.tie_word_embeddings else (_HEAD_PATH,)
        return ("embed/embedding", *layer_paths, "final_norm/scale", *head)

    def stack(self, path: str) -> tuple[int, ...]:
        """Returns the leading dims that count tensors: () for a whole leaf, (layers,), or (layers, experts)."""
        if path.startswith(EXPERTS_PREFIX):
            return (self.num_layers, self.num_experts)
        return (self.num_layers,) if is_stacked(path) else ()

    def hf_names(self, path: str) -> tuple[str, ...]:
        """Returns the Hugging Face names of one leaf, in slice order. Raises ValueError for an unknown path."""
        if not self._has(path):
            raise ValueError(f"parameter {path!r}: expected one of {list(self.paths())}")
        if path in _IN_EXPERT:
            return tuple(
                f"model.layers.{i}.mlp.experts.{j}.{_IN_EXPERT[path]}"
                for i in range(self.num_layers)
                for j in range(self.num_experts)
            )
        if is_stacked(path):
            return tuple(f"model.layers.{i}.{self._in_layer[path]}" for i in range(self.num_layers))
        return (_WHOLE[path],)

    def all_hf_names(self) -> tuple[str, ...]:
        """Returns every Hugging Face name of this model, leaf by leaf."""
        return tuple(name for path in self.paths() for name in self.hf_names(path))

    def locate(self, hf_name: str) -> tuple[str, tuple[int, ...]]:
        """Returns (path, index) of a Hugging Face tensor: `leaf[index]`; raises ValueError for an unknown tensor.

        The index is (), (layer,) or (layer, expert).
        """
        path, index = _PATH_OF_WHOLE.get(hf_name), ()
        if layer := _HF_LAYER.fullmatch(hf_name):
            path, index = _paths_in_layer(self.own_names).get(layer[2]), (int(layer[1]),)
            if expert := _HF_EXPERT.fullmatch(layer[2]):
                path, index = _PATH_IN_EXPERT.get(expert[2]), (int(layer[1]), int(expert[1]))
        in_range = path is not None and all(i < n for i, n in zip(index, self.stack(path), strict=True))
        if path is None or not self._has(path) or not in_range:
            raise ValueError(f"tensor {hf_name!r} is not in this model ({self})")
        return path, index

    def _has(self, path: str) -> bool:
        if path in _QKV_BIAS:
            return self.qkv_bias
        if path in _QK_NORM:
            return self.qk_norm
        if path in _MOE:
            return self.num_experts > 0
        if path in _DENSE:
            return self.num_experts == 0
        if path == "layers/o_proj/bias":
            return self.o_bias
        if path == _HEAD_PATH:
            return not self.tie_word_embeddings
        if path in _MLP_BIAS:
            return self.mlp_bias and self.num_experts == 0
        return path in self._in_layer or path in _WHOLE

    @property
    def _in_layer(self) -> Mapping[str, str]:
        return _names_in_layer(self.own_names)


@functools.cache
def _names_in_layer(own_names: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return _IN_LAYER | dict(own_names)


@functools.cache
def _paths_in_layer(own_names: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return {suffix: path for path, suffix in _names_in_layer(own_names).items()}


def check_same_names(kind: str, *, got: Mapping[str, Any], wanted: tuple[str, ...]) -> None:
    """Raises ValueError if two sets of names differ, with the first 8 missing and unexpected names."""
    missing = [name for name in wanted if name not in got]
    unexpected = sorted(set(got) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"{kind} names differ: {len(missing)} missing {missing[:8]}, {len(unexpected)} unexpected {unexpected[:8]}"
        )


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested dict of parameters as {"layers/q_proj/kernel": leaf, ...}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            branch = cast(Mapping[str, Any], value)
            flat.update({f"{key}/{rest}": leaf for rest, leaf in flatten(branch).items()})
        else:
            flat[key] = value
    return flat


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict of a flat one; inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


A, B = "lora_a", "lora_b"
_PREFIX = "base_model.model."
_WEIGHT = ".weight"
_PEFT = {A: ".lora_A.weight", B: ".lora_B.weight"}


class TensorNames(Protocol):
    """Names of a snapshot's leaves: those of a model or of its adapters."""

    def paths(self) -> tuple[str, ...]:
        """Returns every Flax path."""
        ...

    def stack(self, path: str) -> tuple[int, ...]:
        """Returns the leading dims that count tensors."""
        ...

    def hf_names(self, path: str) -> tuple[str, ...]:
        """Returns the tensors of one leaf, in slice order."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNames:
    """Names of the LoRA adapters of a model."""

    model: ParamNames
    modules: tuple[str, ...]
    """Matrices with an adapter, as in `LoraConfig.modules`."""

    def paths(self) -> tuple[str, ...]:
        """Returns every Flax path."""
        return tuple(f"layers/{module}/{part}" for module in self.modules for part in (A, B))

    def stack(self, path: str) -> tuple[int, ...]:
        """Returns (layers,), the leading dim that counts tensors."""
        return self.model.stack(_kernel(path))

    def hf_names(self, path: str) -> tuple[str, ...]:
        """Returns the PEFT names of one leaf, in slice order."""
        part = path.rpartition("/")[2]
        return tuple(adapter_tensor(name, part) for name in self.model.hf_names(_kernel(path)))


def adapter_tensor(weight: str, part: str) -> str:
    """Returns the PEFT name of a matrix's `lora_a` or `lora_b`.

    Example: model.layers.0.mlp.up_proj.weight -> base_model.model.model.layers.0.mlp.up_proj.lora_A.weight.
    """
    return _PREFIX + weight.removesuffix(_WEIGHT) + _PEFT[part]


def adapter_table(
    table: Mapping[str, tuple[str, tuple[int, ...]]], *, modules: tuple[str, ...], rank: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns name -> (dtype, shape) of the adapters of a model's `table`. Raises ValueError if it lacks a matrix."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for module in modules:
        names = [name for name in table if name.endswith(f".{module}{_WEIGHT}") and ".experts." not in name]
        if not names:
            raise ValueError(f"lora.targets: the model has no {module}; remove {module.removesuffix('_proj')}")
        for name in names:
            dtype, (num_out, num_in) = table[name]
            found[adapter_tensor(name, A)] = (dtype, (rank, num_in))
            found[adapter_tensor(name, B)] = (dtype, (num_out, rank))
    return found


def base_names(tensors: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Groups adapter tensors by their matrix: vLLM's module name -> {lora_a: tensor, lora_b: tensor}."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        for part, suffix in _PEFT.items():
            if name.startswith(_PREFIX) and name.endswith(suffix):
                found.setdefault(name.removeprefix(_PREFIX).removesuffix(suffix), {})[part] = name
    return found


def combine(base: Mapping[str, object], adapters: Mapping[str, object]) -> dict[str, object]:
    """Returns one parameter tree of base weights and adapters."""
    return unflatten(flatten(base) | flatten(adapters))


def _kernel(path: str) -> str:
    return path.rpartition("/")[0] + "/kernel"
