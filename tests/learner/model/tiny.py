"""Tiny models, reference models made by transformers, and packed rows; shared by the tests of the model."""

from typing import Any

import numpy as np
import pytest

from configs.model_sizes import MODEL_SIZES
from learner.model.architecture import Architecture
from tests.support.lazy import torch, transformers

SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2)
_MOE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
_LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16)
_NESTED = {"full_attention": {"rope_type": "linear", "rope_theta": 800.0, "factor": 2.5}} | {
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}
}
# No padding token: torch gives its embedding no gradient.
_GEMMA: dict[str, Any] = dict(head_dim=24, num_key_value_heads=1, sliding_window=3, pad_token_id=None)
_LOCAL_FIRST = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", dict(head_dim=24, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3-untied": ("qwen3", dict(head_dim=24, num_key_value_heads=1, tie_word_embeddings=False)),
    "qwen3-biased": ("qwen3", dict(head_dim=8, num_key_value_heads=4, attention_bias=True)),
    "qwen3-theta": ("qwen3", dict(head_dim=16, num_key_value_heads=2, rope_parameters={"rope_theta": 37.0})),
    "qwen3-yarn": ("qwen3", dict(head_dim=24, rope_parameters=_YARN, max_position_embeddings=64)),
    "qwen3-window": ("qwen3", dict(head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    "qwen2-tied": ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2-untied": ("qwen2", dict(num_key_value_heads=4, tie_word_embeddings=False, rms_norm_eps=1e-2)),
    "qwen2-windows": ("qwen2", dict(use_sliding_window=True, sliding_window=3, max_window_layers=1)),
    "qwen2-linear": ("qwen2", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.5))),
    "qwen2-llama3": ("qwen2", dict(rope_parameters=_LLAMA3 | dict(low_freq_factor=1.0, high_freq_factor=4.0))),
    "moe": ("qwen3_moe", dict(head_dim=16, num_key_value_heads=2, tie_word_embeddings=False) | _MOE),
    "moe-tied": ("qwen3_moe", dict(head_dim=8, tie_word_embeddings=True) | _MOE | dict(norm_topk_prob=False)),
    "llama-tied": ("llama", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "llama-biased": ("llama", dict(head_dim=24, num_key_value_heads=1, attention_bias=True, mlp_bias=True)),
    "llama-llama3": ("llama", dict(rope_parameters=_LLAMA3 | dict(low_freq_factor=1.0, high_freq_factor=4.0))),
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.5))),
    "mistral-window": ("mistral", dict(num_key_value_heads=1, sliding_window=4, tie_word_embeddings=False)),
    "mistral-tied": ("mistral", dict(head_dim=24, sliding_window=None, tie_word_embeddings=True)),
    "gemma3-tied": ("gemma3_text", _GEMMA | _LOCAL_FIRST | dict(rope_parameters=_NESTED, query_pre_attn_scalar=11)),
    "gemma3-untied": (
        "gemma3_text",
        _GEMMA
        | dict(head_dim=8, num_key_value_heads=4, attention_bias=True, final_logit_softcapping=7.0)
        | dict(sliding_window_pattern=2, tie_word_embeddings=False),
    ),
    "gemma2-tied": ("gemma2", _GEMMA | dict(query_pre_attn_scalar=9, attn_logit_softcapping=2.0)),
    "gemma2-biased": (
        "gemma2",
        _GEMMA
        | dict(num_key_value_heads=2, attention_bias=True)
        | dict(attn_logit_softcapping=1.5, final_logit_softcapping=5.0),
    ),
}


SIZES = [
    name
    if fields["model_type"] not in [MODEL_SIZES[earlier]["model_type"] for earlier in list(MODEL_SIZES)[:i]]
    else pytest.param(name, marks=pytest.mark.nightly)
    for i, (name, fields) in enumerate(MODEL_SIZES.items())
]
"""Published sizes, for a parametrized test: daily the first one of each family, nightly all."""


def reference(name: str, seed: int = 0) -> Any:
    """A transformers model (float32, eager attention) with every weight, norm and bias drawn at random."""
    family, fields = MODELS[name]
    rope = fields.get("rope_parameters")
    if rope and "full_attention" not in rope:
        fields = fields | {"rope_parameters": {"rope_type": "default"} | rope}
    return reference_of(transformers.AutoConfig.for_model(family, **(SHAPE | fields)), seed)


def reference_of(config: Any, seed: int = 0) -> Any:
    """The same for any transformers config."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            mean = 1.0 if "norm" in key and not model.config.model_type.startswith("gemma") else 0.0
            weight.copy_(mean + 0.3 * torch.randn(weight.shape, generator=generator))
    return model


def save_reference(name: str, folder, seed: int = 0, **save_options) -> Any:
    """Saves the reference model in `folder` and returns it."""
    model = reference(name, seed)
    model.save_pretrained(folder, **save_options)
    return model


def config_of(name: str) -> Architecture:
    return Architecture.from_hf(reference(name).config.to_dict() | {"architectures": None})


def pack(sequences, length: int):
    """One row, sequences then padding: tokens, positions, segment_ids, each [1, S]."""
    tokens, positions, segments = (np.zeros((1, length), np.int32) for _ in range(3))
    start = 0
    for i, sequence in enumerate(sequences):
        end = start + len(sequence)
        tokens[0, start:end], segments[0, start:end] = sequence, i + 1
        positions[0, start:end] = np.arange(len(sequence))
        start = end
    return tokens, positions, segments


def row(tokens):
    """Unpacked tokens [B, S] as a batch of whole rows."""
    tokens = np.asarray(tokens, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return tokens, positions, np.ones_like(tokens)
