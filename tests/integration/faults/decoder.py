"""Qwen3's forward pass in numpy, by the book: what a small engine serves without torch and without jax.

Every token is computed from the whole sequence before it, without a cache, so it is of exactly the weights given here.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model's config.json says of its shape."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Shape":
        """Of a Hugging Face folder; ValueError for another family than Qwen3."""
        told = json.loads((folder / "config.json").read_text())
        if told["model_type"] != "qwen3":
            raise ValueError(f"{folder} is a {told['model_type']}, this decoder computes qwen3 alone")
        return cls(
            num_layers=told["num_hidden_layers"],
            num_heads=told["num_attention_heads"],
            num_kv_heads=told["num_key_value_heads"],
            head_dim=told["head_dim"],
            eps=told["rms_norm_eps"],
            # In a dictionary of its own since transformers 5.
            rope_theta=told["rope_theta"] if "rope_theta" in told else told["rope_parameters"]["rope_theta"],
        )


def next_logits(
    shape: Shape, weights: Mapping[str, np.ndarray], sequences: Sequence[Int32[np.ndarray, " T"]]
) -> Float32[np.ndarray, "B V"]:
    """The logits of what follows each sequence; weights by Hugging Face's names, float32."""
    length = max(s.size for s in sequences)
    tokens = np.zeros((len(sequences), length), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: sequence.size] = sequence  # what follows is seen by nobody: attention is causal
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(shape.num_layers):
        own = {n.removeprefix(f"model.layers.{layer}."): w for n, w in weights.items() if f".layers.{layer}." in n}
        x = x + _attention(shape, own, _norm(x, own["input_layernorm.weight"], shape.eps))
        x = x + _mlp(own, _norm(x, own["post_attention_layernorm.weight"], shape.eps))
    last = x[np.arange(len(sequences)), [s.size - 1 for s in sequences]]
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(last, weights["model.norm.weight"], shape.eps) @ head.T


def log_softmax(logits: Float32[np.ndarray, "B V"]) -> Float32[np.ndarray, "B V"]:
    """Nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _attention(shape: Shape, own: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    batch, length, _ = x.shape

    def heads(name: str, num: int) -> np.ndarray:
        return (x @ own[f"self_attn.{name}_proj.weight"].T).reshape(batch, length, num, shape.head_dim)

    turn = _rotation(shape, length)
    q = _rotate(_norm(heads("q", shape.num_heads), own["self_attn.q_norm.weight"], shape.eps), turn)
    k = _rotate(_norm(heads("k", shape.num_kv_heads), own["self_attn.k_norm.weight"], shape.eps), turn)
    each = shape.num_heads // shape.num_kv_heads
    k, v = (np.repeat(a, each, axis=2) for a in (k, heads("v", shape.num_kv_heads)))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k, optimize=True) / np.float32(np.sqrt(shape.head_dim))
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, np.float32(-np.inf))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v, optimize=True)
    return mixed.reshape(batch, length, -1) @ own["self_attn.o_proj.weight"].T


def _mlp(own: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    gate, up = (x @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps)) * weight


def _rotation(shape: Shape, length: int) -> tuple[np.ndarray, np.ndarray]:
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-np.arange(half, dtype=np.float32) / np.float32(half))
    angles = np.arange(length, dtype=np.float32)[:, None, None] * frequencies.astype(np.float32)
    return np.sin(angles), np.cos(angles)


def _rotate(x: np.ndarray, turn: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    sin, cos = turn
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
