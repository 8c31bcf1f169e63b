"""Tiny models, reference models made by transformers, and packed rows; shared by the tests of the model."""

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from learner.model.config import ModelConfig

SHAPE = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4)
MODELS = {
    "qwen3-tied": ("qwen3", dict(head_dim=24, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3-untied": ("qwen3", dict(head_dim=24, num_key_value_heads=1, tie_word_embeddings=False)),
    "qwen3-biased": ("qwen3", dict(head_dim=8, num_key_value_heads=4, attention_bias=True)),
    "qwen3-theta": ("qwen3", dict(head_dim=16, num_key_value_heads=2, rope_parameters={"rope_theta": 37.0})),
    "qwen2-tied": ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2-untied": ("qwen2", dict(num_key_value_heads=4, tie_word_embeddings=False, rms_norm_eps=1e-2)),
}


def reference(name: str, seed: int = 0):
    """A transformers model (float32, eager attention) with every weight, norm and bias drawn at random."""
    family, fields = MODELS[name]
    fields = {k: dict(v, rope_type="default") if k == "rope_parameters" else v for k, v in fields.items()}
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    config = config_class(**SHAPE, **fields, attn_implementation="eager")
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            mean = 1.0 if "norm" in key else 0.0
            weight.copy_(mean + 0.3 * torch.randn(weight.shape, generator=generator))
    return model


def save_reference(name: str, folder, seed: int = 0, **save_options):
    """Saves the reference model in `folder` and returns it."""
    model = reference(name, seed)
    model.save_pretrained(folder, **save_options)
    return model


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_hf(reference(name).config.to_dict() | {"architectures": None})


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
