"""Attention on Hopper GPUs and newer: cuDNN packed attention.

JAX's public `dot_product_attention` passes no segments to cuDNN. The private module behind it does (since JAX 0.5), as
start and length of each segment; only this file uses it. Requires JAX 0.10 with a CUDA plugin, cuDNN 9.6 or later, a
Hopper GPU or newer, bfloat16 or float16, and head_dim a multiple of 8 up to 128.

Two limits shape the code. First, up to JAX 0.10.2 key offsets use the query heads' stride (fixed in jax pull request
39521), so grouped key heads read wrong tokens. Keys and values are therefore repeated to one per query head, which is
correct with and without the fix. Second, the number of segments per row is static and sizes a float32 [B *
max_segments, H, S] array. A row with more segments gives NaN, which the learner counts and rejects, instead of a wrong
result.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

MAX_HEAD_DIM = 128


def cudnn_refusal(*, dtype, head_dim: int, compute_capability: str | None) -> str | None:
    """Returns why cuDNN does not support a call, or None if it does.

    `compute_capability` is "9.0" for Hopper, and None for a device that is not an NVIDIA GPU.
    """
    if compute_capability is None:
        return "it needs an NVIDIA GPU"
    if tuple(int(x) for x in compute_capability.split(".")) < (9, 0):
        return f"packed rows need compute capability 9.0 (Hopper), the GPU has {compute_capability}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, got {jnp.dtype(dtype)}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}"
    return None


def segment_layout(
    segment_ids: Int[Array, "B S"], max_segments: int
) -> tuple[Int[Array, "B M+1"], Int[Array, "B M"], Bool[Array, " B"]]:
    """Returns (starts, lengths, fits) of each row's segments, padded with -1 to M = max_segments.

    The kernel requires one more column in starts than in lengths; it stays -1. A row fits if it has at most M segments.
    """
    ids = segment_ids
    batch, length = ids.shape
    before = jnp.concatenate([jnp.zeros((batch, 1), ids.dtype), ids[:, :-1]], 1)
    begins = (ids != before) & (ids != 0)
    # Padding and segments beyond the last column go to an extra column that is dropped.
    number = jnp.where(ids != 0, jnp.cumsum(begins, 1) - 1, max_segments)
    number = jnp.minimum(number, max_segments)
    row = jnp.arange(batch)[:, None]
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
    starts = jnp.full((batch, max_segments + 1), length, jnp.int32).at[row, number].min(index)
    lengths = jnp.zeros((batch, max_segments + 1), jnp.int32).at[row, number].add(1)
    used = jnp.arange(max_segments) < begins.sum(1, keepdims=True)
    starts = jnp.where(used, starts[:, :-1], -1)
    lengths = jnp.where(used, lengths[:, :-1], -1)
    nothing = jnp.full((batch, 1), -1, jnp.int32)
    return jnp.concatenate([starts, nothing], 1), lengths, begins.sum(1) <= max_segments


def cudnn_attention(
    q: Float[Array, "B S H hd"],
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    segment_ids: Int[Array, "B S"],
    *,
    scale: float,
    window: int | None = None,
    max_segments: int = 64,
) -> Float[Array, "B S H hd"]:
    """Computes `dispatch.attention` on one device; rows with more than `max_segments` segments are NaN."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    group = q.shape[2] // k.shape[2]
    # A maximum of one segment per row would select the layout without offsets.
    max_segments = max(2, min(max_segments, q.shape[1]))
    starts, lengths, fits = segment_layout(segment_ids, max_segments)
    real = (segment_ids != 0)[..., None, None]
    # The kernel leaves padding unwritten, in the output and in the gradients: `where` keeps both out.
    zero = jnp.zeros((), q.dtype)
    q, k, v = (jnp.where(real, x, zero) for x in (q, k, v))
    out: Any = cudnn.dot_product_attention(
        q,
        jnp.repeat(k, group, 2),
        jnp.repeat(v, group, 2),
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )
    out = jnp.where(real, out, zero)
    return lax.select(jnp.broadcast_to(fits[:, None, None, None], out.shape), out, jnp.full_like(out, jnp.nan))
