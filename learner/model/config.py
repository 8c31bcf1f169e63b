"""The model's shape, read from a Hugging Face `config.json`. Pure: no jax, no arrays.

What this code would compute differently from the reference model is refused by name (quantised weights, an
unknown rope scaling ...), because a model that is slightly wrong still trains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from bridge.names import ParamNames
from learner.model.hf.fields import (
    ROPE_HOMES,
    RopeScaling,
    check_experts,
    need,
    read_json,
    read_rope,
    read_windows,
    refuse,
)

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
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
_HF_MOE_KEYS = {
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shapes and constants of a Qwen2, Qwen2.5, Qwen3 or Qwen3-MoE decoder; hashable.

    `router_aux_loss_coef` of a MoE config is not used: a balancing loss would bias the policy gradient, and
    reinforcement learning starts from a router that is trained. It stays in the config.json that is handed back.
    """

    family: Literal["qwen2", "qwen3", "qwen3_moe"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of a dense layer's MLP; a MoE model has no dense layer, and keeps the number."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Longest sequence, in tokens, that the model was made for."""
    qkv_bias: bool
    o_bias: bool
    sliding_window: int | None = None
    """A token of a windowed layer sees itself and the `sliding_window` - 1 tokens before it."""
    windowed_layers: tuple[bool, ...] = ()
    """Which layers have the window; () when there is none."""
    num_experts: int = 0
    """Experts of each layer; 0 is a dense model."""
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    """Width of one expert."""
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts are made to sum to one."""
    hf_json: str = dataclasses.field(default="{}", repr=False, compare=False)
    """The config.json that was read, so that `to_hf` can hand everything back."""

    def __post_init__(self) -> None:
        """Refuses shapes that no decoder has, and fields that the family doesn't have."""
        if self.family not in _ARCHITECTURES:
            refuse("model_type", self.family, f"one of {sorted(_ARCHITECTURES)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            optional = field.name in _HF_MOE_KEYS and self.family != "qwen3_moe"
            if field.type in ("int", "float") and not optional and (isinstance(value, bool) or value <= 0):
                refuse((_HF_KEYS | _HF_MOE_KEYS).get(field.name, field.name), value, "a positive number")
        if self.num_heads % self.num_kv_heads:
            refuse("num_key_value_heads", self.num_kv_heads, f"a divisor of {self.num_heads} heads")
        if self.head_dim % 2:
            refuse("head_dim", self.head_dim, "an even number (rotary halves)")
        biases = (self.qkv_bias, self.o_bias)
        wanted = {"qwen2": [(True, False)], "qwen3": [(False, False), (True, True)], "qwen3_moe": [(False, False)]}
        if biases not in wanted[self.family]:
            refuse("attention_bias", biases, f"(qkv, o) one of {wanted[self.family]} for {self.family}")
        if (self.sliding_window is None) != (not any(self.windowed_layers)):
            refuse("sliding_window", self.sliding_window, "a window and layers that have it, or neither")
        if self.windowed_layers and len(self.windowed_layers) != self.num_layers:
            refuse("layer_types", self.windowed_layers, f"one entry for each of {self.num_layers} layers")
        if self.num_experts and self.family != "qwen3_moe":
            refuse("num_experts", self.num_experts, f"0 for {self.family}")
        if self.num_experts_per_token > self.num_experts:
            refuse("num_experts_per_tok", self.num_experts_per_token, f"at most {self.num_experts} experts")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normalised per head before the rotation."""
        return self.family != "qwen2"

    @property
    def param_names(self) -> ParamNames:
        """The names of the parameters, Flax and Hugging Face."""
        return ParamNames(
            num_layers=self.num_layers,
            tie_word_embeddings=self.tie_word_embeddings,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
            num_experts=self.num_experts,
        )

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Architecture:
        """Reads a config.json (the file, its folder, or the parsed mapping).

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: a field is missing, or asks for something this decoder doesn't do; names the field.
        """
        raw = dict(source) if isinstance(source, Mapping) else read_json(pathlib.Path(source))
        family = need(raw, "model_type", str)
        if family not in _ARCHITECTURES:
            refuse("model_type", family, f"one of {sorted(_ARCHITECTURES)}")
        _refuse_what_is_not_computed(raw, family)
        num_layers = need(raw, "num_hidden_layers", int)
        rope_theta, rope_scaling = read_rope(raw)
        sliding_window, windowed_layers = read_windows(raw, family, num_layers)
        moe: dict[str, Any] = {}
        if family == "qwen3_moe":
            check_experts(raw)
            # transformers 5 writes the number of experts under the name of its expert-parallel code.
            aliased = {"num_experts": raw["num_local_experts"]} if "num_local_experts" in raw else {}
            if aliased and raw.get("num_experts", aliased["num_experts"]) != aliased["num_experts"]:
                refuse("num_experts", raw["num_experts"], f"num_local_experts, {aliased['num_experts']}")
            moe = {
                field: need(aliased | raw, key, bool if field == "norm_topk_prob" else int)
                for field, key in _HF_MOE_KEYS.items()
            }
        # Qwen2 has no attention_bias field: q, k, v are always biased and o never is.
        bias = need(raw, "attention_bias", bool) if family != "qwen2" else True
        return cls(
            family=family,
            vocab_size=need(raw, "vocab_size", int),
            hidden_size=need(raw, "hidden_size", int),
            intermediate_size=need(raw, "intermediate_size", int),
            num_layers=num_layers,
            num_heads=need(raw, "num_attention_heads", int),
            num_kv_heads=need(raw, "num_key_value_heads", int),
            head_dim=_read_head_dim(raw, family),
            rms_norm_eps=need(raw, "rms_norm_eps", float),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=need(raw, "tie_word_embeddings", bool),
            max_position_embeddings=need(raw, "max_position_embeddings", int),
            qkv_bias=bias,
            o_bias=bias and family != "qwen2",
            sliding_window=sliding_window,
            windowed_layers=windowed_layers,
            hf_json=json.dumps(raw),
            **moe,
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model: what was read, with only the changed fields rewritten."""
        raw = json.loads(self.hf_json)
        read = Architecture.from_hf(raw) if raw else None
        if read is None:
            raw = {"architectures": [_ARCHITECTURES[self.family]], "hidden_act": "silu"}
        keys = _HF_KEYS | (_HF_MOE_KEYS if self.family == "qwen3_moe" else {})
        for field, key in keys.items():
            if read is None or getattr(read, field) != getattr(self, field):
                raw[key] = getattr(self, field)
                if field == "num_experts":
                    raw.pop("num_local_experts", None)
        if self.family != "qwen2" and (read is None or read.qkv_bias != self.qkv_bias):
            raw["attention_bias"] = self.qkv_bias
        self._write_rope(raw, read)
        self._write_windows(raw, read)
        if read is not None and read.family != self.family:
            raw["architectures"] = [_ARCHITECTURES[self.family]]
        return raw

    def _write_rope(self, raw: dict[str, Any], read: Architecture | None) -> None:
        if read is None or read.rope_scaling != self.rope_scaling:
            home = next((home for home in ROPE_HOMES if raw.get(home)), "rope_scaling")
            raw[home] = None if self.rope_scaling is None else self.rope_scaling.to_hf()
            for other in set(ROPE_HOMES) - {home}:
                raw.pop(other, None)
            raw["rope_theta"] = self.rope_theta
        if read is None or read.rope_theta != self.rope_theta:
            homes = [rope for home in ROPE_HOMES if (rope := raw.get(home)) and "rope_theta" in rope]
            for rope in homes:
                rope["rope_theta"] = self.rope_theta
            if "rope_theta" in raw or not homes:
                raw["rope_theta"] = self.rope_theta

    def _write_windows(self, raw: dict[str, Any], read: Architecture | None) -> None:
        now = (self.sliding_window, self.windowed_layers)
        if read is not None and (read.sliding_window, read.windowed_layers) == now:
            # Without a window, `layer_types` still counts the layers.
            if read.num_layers != self.num_layers and raw.get("layer_types"):
                raw["layer_types"] = ["full_attention"] * self.num_layers
            return
        windowed = self.windowed_layers or (False,) * self.num_layers
        raw["use_sliding_window"] = self.sliding_window is not None
        if self.sliding_window is not None:
            raw["sliding_window"] = self.sliding_window
        raw["max_window_layers"] = windowed.index(True) if any(windowed) else self.num_layers
        raw.pop("layer_types", None)
        if self.family != "qwen3_moe":
            raw["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windowed]


def _read_head_dim(raw: Mapping[str, Any], family: str) -> int:
    if family != "qwen2" or raw.get("head_dim") is not None:
        return need(raw, "head_dim", int)
    hidden_size, num_heads = need(raw, "hidden_size", int), need(raw, "num_attention_heads", int)
    if num_heads < 1 or hidden_size % num_heads:
        refuse("hidden_size", hidden_size, f"a multiple of {num_heads} heads")
    return hidden_size // num_heads


def _refuse_what_is_not_computed(raw: Mapping[str, Any], family: str) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", raw["hidden_act"], "'silu'")
    if raw.get("architectures") and raw["architectures"] != [_ARCHITECTURES[family]]:
        refuse("architectures", raw["architectures"], f"[{_ARCHITECTURES[family]!r}]")
    if raw.get("attention_dropout"):
        refuse("attention_dropout", raw["attention_dropout"], "0")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", raw["partial_rotary_factor"], "1.0 or absent")
    for field in ("quantization_config", "dual_chunk_attention_config"):
        if raw.get(field) is not None:
            refuse(field, raw[field], "absent")
