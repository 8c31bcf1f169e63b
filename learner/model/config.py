"""The model's shape, read from a Hugging Face `config.json`. Pure: no jax, no arrays.

What this code would compute differently from the reference model is refused by name (a rope scaling, a
sliding window, quantised weights ...), because a model that is slightly wrong still trains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from bridge.names import ParamNames

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_HF_KEYS = {
    "family": "model_type",
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of a Qwen2, Qwen2.5 or Qwen3 decoder; hashable."""

    family: Literal["qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Longest sequence, in tokens, that the model was made for."""
    qkv_bias: bool
    o_bias: bool
    hf_json: str = dataclasses.field(default="{}", repr=False, compare=False)
    """The config.json that was read, so that `to_hf` can hand everything back."""

    def __post_init__(self) -> None:
        """Refuses shapes that no decoder has, and biases that the family doesn't have."""
        if self.family not in _ARCHITECTURES:
            _refuse("model_type", self.family, f"one of {sorted(_ARCHITECTURES)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and (isinstance(value, bool) or value <= 0):
                _refuse(_HF_KEYS.get(field.name, field.name), value, "a positive number")
        if self.num_heads % self.num_kv_heads:
            _refuse("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_heads} heads")
        if self.head_dim % 2:
            _refuse("head_dim", self.head_dim, "an even number (rotary halves)")
        biases = (self.qkv_bias, self.o_bias)
        if biases != (True, False) if self.family == "qwen2" else self.qkv_bias != self.o_bias:
            _refuse("attention_bias", biases, "(qkv, o): (True, False) for qwen2, equal for qwen3")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normalised per head before the rotation."""
        return self.family == "qwen3"

    @property
    def param_names(self) -> ParamNames:
        """The names of the parameters, Flax and Hugging Face."""
        return ParamNames(
            num_layers=self.num_layers,
            tie_word_embeddings=self.tie_word_embeddings,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
        )

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Reads a config.json (the file, its folder, or the parsed mapping).

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: a field is missing, or asks for something this decoder doesn't do; names the field.
        """
        raw = dict(source) if isinstance(source, Mapping) else _read_json(pathlib.Path(source))
        family = _need(raw, "model_type", str)
        if family not in _ARCHITECTURES:
            _refuse("model_type", family, f"one of {sorted(_ARCHITECTURES)}")
        num_layers = _need(raw, "num_hidden_layers", int)
        _refuse_what_is_not_computed(raw, family, num_layers)
        hidden_size, num_heads = _need(raw, "hidden_size", int), _need(raw, "num_attention_heads", int)
        if family == "qwen2" and raw.get("head_dim") is None:
            if num_heads < 1 or hidden_size % num_heads:
                _refuse("hidden_size", hidden_size, f"a multiple of {num_heads} heads")
            head_dim = hidden_size // num_heads
        else:
            head_dim = _need(raw, "head_dim", int)
        # Qwen2 has no attention_bias field: q, k, v are always biased and o never is.
        bias = _need(raw, "attention_bias", bool) if family == "qwen3" else True
        return cls(
            family=family,
            vocab_size=_need(raw, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_need(raw, "intermediate_size", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_need(raw, "num_key_value_heads", int),
            head_dim=head_dim,
            rms_norm_eps=_need(raw, "rms_norm_eps", float),
            rope_theta=_read_rope_theta(raw),
            tie_word_embeddings=_need(raw, "tie_word_embeddings", bool),
            max_position_embeddings=_need(raw, "max_position_embeddings", int),
            qkv_bias=bias,
            o_bias=bias and family == "qwen3",
            hf_json=json.dumps(raw),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model: what was read, with only the changed fields rewritten."""
        raw = json.loads(self.hf_json)
        read = ModelConfig.from_hf(raw) if raw else None
        if read is None:
            raw = {"architectures": [_ARCHITECTURES[self.family]], "hidden_act": "silu"}
        for field, key in _HF_KEYS.items():
            if read is None or getattr(read, field) != getattr(self, field):
                raw[key] = getattr(self, field)
        if self.family == "qwen3" and (read is None or read.qkv_bias != self.qkv_bias):
            raw["attention_bias"] = self.qkv_bias
        if read is None or read.rope_theta != self.rope_theta:
            if "rope_theta" in raw or read is None:
                raw["rope_theta"] = self.rope_theta
            if raw.get("rope_parameters"):
                raw["rope_parameters"]["rope_theta"] = self.rope_theta
        if read is not None and read.num_layers != self.num_layers and raw.get("layer_types"):
            raw["layer_types"] = ["full_attention"] * self.num_layers
        if read is not None and read.family != self.family:
            raw["architectures"] = [_ARCHITECTURES[self.family]]
        return raw


def _refuse(field: str, got: object, wanted: str) -> NoReturn:
    raise ValueError(f"config.json: {field}: got {got!r}, wanted {wanted}")


def _need(raw: Mapping[str, Any], field: str, kind: type) -> Any:
    if field not in raw:
        raise ValueError(f"config.json: {field}: missing, wanted {kind.__name__}")
    value = raw[field]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        _refuse(field, value, kind.__name__)
    return value


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no model config at {path}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: got a JSON {type(raw).__name__}, wanted an object")
    return raw


def _read_rope_theta(raw: Mapping[str, Any]) -> float:
    """The rotary base from either home: transformers 5's `rope_parameters`, or the top level."""
    found: dict[str, float] = {}
    if "rope_theta" in raw:
        found["rope_theta"] = _need(raw, "rope_theta", float)
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            _refuse(name, rope, "an object or null")
        for key in ("rope_type", "type"):
            if rope.get(key, "default") not in ("default", "none", None):
                _refuse(f"{name}.{key}", rope[key], "'default' (no scaling)")
        for key in rope:
            if key not in ("rope_type", "type", "rope_theta"):
                _refuse(f"{name}.{key}", rope[key], "absent (plain rotary embedding)")
        if "rope_theta" in rope:
            found[f"{name}.rope_theta"] = _need(rope, "rope_theta", float)
    if not found:
        raise ValueError("config.json: rope_theta: missing, wanted it or rope_parameters.rope_theta")
    if len(set(found.values())) > 1:
        _refuse("rope_theta", found, "one value")
    return next(iter(found.values()))


def _refuse_what_is_not_computed(raw: Mapping[str, Any], family: str, num_layers: int) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", raw["hidden_act"], "'silu'")
    if raw.get("architectures") and raw["architectures"] != [_ARCHITECTURES[family]]:
        _refuse("architectures", raw["architectures"], f"[{_ARCHITECTURES[family]!r}]")
    if raw.get("attention_dropout"):
        _refuse("attention_dropout", raw["attention_dropout"], "0")
    for field in ("quantization_config", "dual_chunk_attention_config"):
        if raw.get(field) is not None:
            _refuse(field, raw[field], "absent")
    layer_types = raw.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        _refuse("layer_types", layer_types, f"'full_attention' for each of {num_layers} layers")
    # The window applies to the layers from max_window_layers on; without layer_types that decides.
    if raw.get("use_sliding_window") and layer_types is None:
        first = raw.get("max_window_layers")
        if raw.get("sliding_window") is not None and (first is None or first < num_layers):
            _refuse("use_sliding_window", True, f"false, or max_window_layers >= {num_layers}")
