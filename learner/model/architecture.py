"""Model architecture from a Hugging Face config.json, and the registry of families.

Settings that this code would compute differently from the reference model (quantized weights, unknown rope scaling)
raise ValueError with the field's name, because a slightly wrong model still trains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from bridge.param_names import ParamNames
from learner.model.families.config_fields import Rope, RopeScaling, need, read_json, refuse
from learner.model.families.family import Family, HfField, no_windows
from learner.model.families.gemma import GEMMA2, GEMMA3
from learner.model.families.llama import LLAMA, MISTRAL
from learner.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)
}


_HINTS = {
    "gemma3": "; save only the text part of a model with images, as gemma3_text",
    "mistral3": "; save only the text part of a model with images, as mistral",
    "mllama": "; save only the text part of a model with images, as llama",
}
"""Advice for unsupported model types that are close to a supported one."""


def family_of(model_type: Any) -> Family:
    """Returns the family of a `model_type`; raises ValueError with the supported ones if it is unknown."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        refuse("model_type", model_type, f"one of {sorted(FAMILIES)}{_HINTS.get(str(model_type), '')}")
    return FAMILIES[model_type]


def owned_fields() -> dict[str, str]:
    """Returns the config.json keys of `Architecture` fields that only some families have, by field."""
    return {name: field.key for family in FAMILIES.values() for name, field in family.fields.items()}


_HF_KEYS = {
    "model_type": "model_type",
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
_OWNED = owned_fields()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes and constants of a decoder; hashable."""

    model_type: str
    """Key of `learner.model.architecture.FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of a dense layer's MLP; unused but preserved in MoE models, which have no dense layer."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    """Rotary base of windowed layers, unscaled; None if all layers share one rotation."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Maximum sequence length of the model, in tokens."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool = False
    query_pre_attn_scalar: float | None = None
    """Number whose square root divides attention scores; None means head_dim."""
    attention_soft_cap: float | None = None
    """Cap of attention scores s, which become cap * tanh(s / cap); None disables it."""
    logit_soft_cap: float | None = None
    """Cap of logits z, which become cap * tanh(z / cap); None disables it."""
    sliding_window: int | None = None
    """Window size in tokens: a token in a windowed layer sees itself and `sliding_window` - 1 tokens before it."""
    windowed_layers: tuple[bool, ...] = ()
    """True per windowed layer; () if no layer has a window."""
    num_experts: int = 0
    """Experts per layer; 0 for a dense model."""
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    """Width of one expert."""
    norm_topk_prob: bool = False
    """True if the weights of a token's experts are normalized to sum to one."""
    hf_json: str = dataclasses.field(default="{}", repr=False, compare=False)
    """Original config.json, including unused fields."""

    def __post_init__(self) -> None:
        """Raises ValueError for impossible shapes and for fields that the family does not have."""
        family = self.family
        for field in dataclasses.fields(self):
            value, key = getattr(self, field.name), _key(family, field.name)
            if field.name in _OWNED and field.name not in family.fields:
                if value != field.default:
                    refuse(key, value, f"{field.default} for {self.model_type}")
                continue
            is_number = field.type in ("int", "float", "float | None")
            if is_number and value is not None and (isinstance(value, bool) or value <= 0):
                refuse(key, value, "a positive number")
        if self.num_heads % self.num_kv_heads:
            refuse("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_heads} heads")
        if self.head_dim % 2:
            refuse("head_dim", self.head_dim, "an even number (rotary halves)")
        biases = (self.qkv_bias, self.o_bias)
        if biases not in family.attention_biases:
            refuse("attention_bias", biases, f"(qkv, o) one of {list(family.attention_biases)} for {self.model_type}")
        if (self.local_rope_theta is not None) != family.local_rope:
            refuse(
                "rope_local_base_freq",
                self.local_rope_theta,
                f"{'one' if family.local_rope else 'none'} for {self.model_type}",
            )
        if self.sliding_window is not None and family.read_windows is no_windows:
            refuse("sliding_window", self.sliding_window, f"none for {self.model_type}")
        if (self.sliding_window is None) != (not any(self.windowed_layers)):
            refuse("sliding_window", self.sliding_window, "a window and layers that have it, or neither")
        if self.windowed_layers and len(self.windowed_layers) != self.num_layers:
            refuse("layer_types", self.windowed_layers, f"one entry for each of {self.num_layers} layers")
        if self.num_experts_per_token > self.num_experts:
            refuse("num_experts_per_tok", self.num_experts_per_token, f"at most {self.num_experts} experts")

    @property
    def family(self) -> Family:
        """Model family; raises ValueError if unknown."""
        return family_of(self.model_type)

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are RMS-normalized per head before the rotation."""
        return self.family.qk_norm

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def rope(self) -> Rope:
        """Rotary embedding of global and windowed layers."""
        return Rope(self.rope_theta, self.rope_scaling, self.local_rope_theta)

    @property
    def param_names(self) -> ParamNames:
        """Flax and Hugging Face names of the parameters."""
        return ParamNames(
            num_layers=self.num_layers,
            tie_word_embeddings=self.tie_word_embeddings,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
            mlp_bias=self.mlp_bias,
            num_experts=self.num_experts,
            own_names=tuple(self.family.names.items()),
        )

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Architecture:
        """Reads a config.json (the file, its folder, or the parsed mapping).

        Raises FileNotFoundError if the file does not exist, and ValueError with the name of a field that is missing or
        requires something unsupported.
        """
        given = dict(source) if isinstance(source, Mapping) else read_json(pathlib.Path(source))
        family = family_of(need(given, "model_type", str))
        raw = dict(family.defaults) | given
        _refuse_what_is_not_computed(raw, family)
        num_layers = need(raw, "num_hidden_layers", int)
        rope = family.read_rope(raw)
        sliding_window, windowed_layers = family.read_windows(raw, num_layers)
        num_heads = need(raw, "num_attention_heads", int)
        has_kv_heads = not family.derives_heads or raw.get("num_key_value_heads", num_heads) is not None
        qkv_bias, o_bias = _read_attention_biases(raw, family)
        return cls(
            model_type=family.model_type,
            vocab_size=need(raw, "vocab_size", int),
            hidden_size=need(raw, "hidden_size", int),
            intermediate_size=need(raw, "intermediate_size", int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=need(raw, "num_key_value_heads", int) if has_kv_heads else num_heads,
            head_dim=_read_head_dim(raw, family),
            rms_norm_eps=need(raw, "rms_norm_eps", float),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            local_rope_theta=rope.local_theta,
            tie_word_embeddings=need(raw, "tie_word_embeddings", bool),
            max_position_embeddings=need(raw, "max_position_embeddings", int),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            sliding_window=sliding_window,
            windowed_layers=windowed_layers,
            hf_json=json.dumps(given),
            **{name: _read_field(raw, field) for name, field in family.fields.items()},
        )


_OWN_CODE = ("AutoModel", "AutoConfig")
"""Prefixes of auto_map entries whose code computes a model; other entries are for tokenizers and processors."""


def _key(family: Family, name: str) -> str:
    owned = {name: field.key for name, field in family.fields.items()}
    return (_HF_KEYS | _OWNED | owned).get(name, name)


def _read_field(raw: Mapping[str, Any], field: HfField) -> Any:
    key = field.alias if field.alias is not None and field.alias in raw else field.key
    if field.optional and key in raw and raw[key] is None:
        return None
    return need(raw, key, field.kind)


def _read_attention_biases(raw: Mapping[str, Any], family: Family) -> tuple[bool, bool]:
    if len(family.attention_biases) == 1:
        return family.attention_biases[0]
    biased = need(raw, "attention_bias", bool)
    return biased, biased


def _read_head_dim(raw: Mapping[str, Any], family: Family) -> int:
    if not family.derives_heads or raw.get("head_dim") is not None:
        return need(raw, "head_dim", int)
    hidden_size, num_heads = need(raw, "hidden_size", int), need(raw, "num_attention_heads", int)
    if num_heads < 1 or hidden_size % num_heads:
        refuse("hidden_size", hidden_size, f"a multiple of {num_heads} heads")
    return hidden_size // num_heads


def _refuse_what_is_not_computed(raw: Mapping[str, Any], family: Family) -> None:
    activation = raw.get(family.activation_key, family.activation_name)
    if activation != family.activation_name:
        refuse(family.activation_key, activation, repr(family.activation_name))
    if raw.get("architectures") and raw["architectures"] != [family.architecture]:
        refuse("architectures", raw["architectures"], f"[{family.architecture!r}]")
    own = {name: code for name, code in (raw.get("auto_map") or {}).items() if name.startswith(_OWN_CODE)}
    if own:
        refuse("auto_map", own, f"no code of a model's own; remove it if it computes a {family.architecture} alike")
    if raw.get("attention_dropout"):
        refuse("attention_dropout", raw["attention_dropout"], "0")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", raw["partial_rotary_factor"], "1.0 or absent")
    if raw.get("quantization_config") is not None:
        refuse("quantization_config", raw["quantization_config"], "absent")
    for field, only in family.only.items():
        if field in raw and raw[field] not in only.values:
            refuse(field, raw[field], f"{only.values[0]!r} or absent ({only.why})")
    family.check(raw)
