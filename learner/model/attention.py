"""Packed, causal, grouped-query attention: one call, several paths behind it.

A token sees the tokens of its own segment whose position is not after its own. Segment 0 is padding: it
sees nothing, is seen by nothing, and its output is exactly zero. A new path (a Pallas or cuDNN kernel) is
one more entry in `PATHS`; it has to pass tests/learner/model/test_attention.py.

The XLA path keeps no `[S, S]` array between forward and backward: it saves the output and the softmax
normaliser of each row (as in FlashAttention, Dao et al. 2022, section 3.1) and recomputes the weights. It
takes the queries a block at a time, so the largest array is `[B, H, block, S]` float32. All keys are
multiplied for every block: the causal half is masked, not skipped.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_MASKED = -1e30
"""Below every real score, and finite, so that no difference of two masked scores is NaN."""


class AttentionPath(Protocol):
    """What a path in `PATHS` computes: `attention`, with the same arguments."""

    def __call__(
        self, q: Array, k: Array, v: Array, segment_ids: Array, positions: Array, *, scale: float, block: int
    ) -> Array:
        """Returns the mixed values, [B, S, H, hd], in q's dtype."""
        ...


def attention(
    q: Float[Array, "B S H hd"],
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    segment_ids: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    *,
    scale: float,
    path: str = "xla",
    block: int = 1024,
) -> Float[Array, "B S H hd"]:
    """softmax(scale q k^T + mask) v within each segment, in float32 inside.

    Args:
      q: queries, after the rotation.
      k: keys, after the rotation; query head h reads key head h // (H / K).
      v: values.
      segment_ids: 0 for padding; equal ids in a row are one sequence.
      positions: place of each token in its sequence.
      scale: factor on the scores, usually hd ** -0.5.
      path: name of the implementation, a key of `PATHS`.
      block: queries taken at a time, in tokens; bounds memory, doesn't change the result.

    Raises:
      ValueError: no such path; block < 1; heads that don't divide; shapes that don't agree.
    """
    if path not in PATHS:
        raise ValueError(f"attention path: got {path!r}, wanted one of {sorted(PATHS)}")
    if block < 1:
        raise ValueError(f"block must be >= 1, got {block}")
    if q.shape[2] % k.shape[2] or k.shape != v.shape or q.shape[:2] != k.shape[:2]:
        raise ValueError(f"attention shapes: got q {q.shape}, k {k.shape}, v {v.shape}")
    if segment_ids.shape != q.shape[:2] or positions.shape != q.shape[:2]:
        raise ValueError(f"wanted [B, S] = {q.shape[:2]}, got {segment_ids.shape}, {positions.shape}")
    return PATHS[path](q, k, v, segment_ids, positions, scale=scale, block=block)


def xla_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, positions: Array, *, scale: float, block: int
) -> Array:
    """The path that runs everywhere, written in plain XLA operations."""
    return _attend(q, k, v, segment_ids, positions, scale, min(block, q.shape[1]))


PATHS: dict[str, AttentionPath] = {"xla": xla_attention}


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q, k, v, segment_ids, positions, scale: float, block: int):
    return _attend_forward(q, k, v, segment_ids, positions, scale, block)[0]


def _attend_forward(q, k, v, segment_ids, positions, scale: float, block: int):
    keys, values = _heads_first(k), _heads_first(v)

    def one_block(_, xs):
        queries, query_ids = xs
        mask = _mask(query_ids, (segment_ids, positions))
        scores = jnp.where(mask, _scores(queries, keys, scale), _MASKED)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.where(mask, jnp.exp(scores - peak), 0.0)
        total = weights.sum(-1, keepdims=True)
        total = jnp.where(total > 0, total, 1.0)  # a padding row sums to 0 and stays 0
        out = _matmul("bkgqs,bksd->bkgqd", weights.astype(v.dtype), values) / total
        return None, (out.astype(q.dtype), peak + jnp.log(total))

    xs = (_query_blocks(q, k.shape[2], block), _id_blocks((segment_ids, positions), block))
    _, (out_blocks, log_totals) = jax.lax.scan(one_block, None, xs)
    out = _from_query_blocks(out_blocks, q.shape[1])
    return out, (q, k, v, segment_ids, positions, out, log_totals)


def _attend_backward(scale: float, block: int, saved: tuple[Any, ...], d_out):
    q, k, v, segment_ids, positions, out, log_totals = saved
    keys, values = _heads_first(k), _heads_first(v)

    def one_block(sums, xs):
        queries, query_ids, out_block, d_out_block, log_total = xs
        mask = _mask(query_ids, (segment_ids, positions))
        weights = jnp.where(mask, jnp.exp(_scores(queries, keys, scale) - log_total), 0.0)
        d_weights = _matmul("bkgqd,bksd->bkgqs", d_out_block, values)
        # d softmax: sum_s P_s dP_s equals out . d_out, which is cheaper.
        row_dot = (out_block.astype(jnp.float32) * d_out_block).sum(-1, keepdims=True)
        d_scores = (weights * (d_weights - row_dot) * scale).astype(q.dtype)
        d_keys = sums[0] + _matmul("bkgqs,bkgqd->bksd", d_scores, queries)
        d_values = sums[1] + _matmul("bkgqs,bkgqd->bksd", weights.astype(v.dtype), d_out_block)
        return (d_keys, d_values), _matmul("bkgqs,bksd->bkgqd", d_scores, keys).astype(q.dtype)

    num_kv = k.shape[2]
    xs = (
        _query_blocks(q, num_kv, block),
        _id_blocks((segment_ids, positions), block),
        _query_blocks(out, num_kv, block),
        _query_blocks(d_out, num_kv, block),
        log_totals,
    )
    zeros = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
    (d_keys, d_values), dq_blocks = jax.lax.scan(one_block, zeros, xs)
    dk, dv = _heads_first(d_keys).astype(k.dtype), _heads_first(d_values).astype(v.dtype)
    return _from_query_blocks(dq_blocks, q.shape[1]), dk, dv, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _matmul(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _scores(queries: Array, keys: Array, scale: float) -> Array:
    """[B, K, G, block, hd] x [B, K, S, hd] -> float32 [B, K, G, block, S]."""
    return _matmul("bkgqd,bksd->bkgqs", queries, keys) * scale


def _mask(query_ids: tuple[Array, Array], key_ids: tuple[Array, Array]) -> Array:
    """True where a query sees a key, [B, 1, 1, block, S]."""
    (q_segment, q_position), (k_segment, k_position) = query_ids, key_ids
    same = (q_segment[:, :, None] == k_segment[:, None, :]) & (q_segment[:, :, None] != 0)
    return (same & (q_position[:, :, None] >= k_position[:, None, :]))[:, None, None]


def _heads_first(x: Array) -> Array:
    """[B, S, K, hd] <-> [B, K, S, hd]."""
    return x.transpose(0, 2, 1, 3)


def _pad_queries(x: Array, block: int) -> Array:
    """Zeros after the sequence up to a whole number of blocks; segment 0, so they see nothing."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))


def _query_blocks(x: Array, num_kv_heads: int, block: int) -> Array:
    """[B, S, H, hd] -> [blocks, B, K, G, block, hd], query heads grouped by the key head they read."""
    batch, _, num_heads, head_dim = x.shape
    x = _pad_queries(x, block)
    x = x.reshape(batch, -1, block, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _from_query_blocks(x: Array, length: int) -> Array:
    """The inverse of `_query_blocks`, padding dropped."""
    num_blocks, batch, num_kv_heads, group, block, head_dim = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, num_blocks * block, num_kv_heads * group, head_dim)[:, :length]


def _id_blocks(ids: tuple[Array, Array], block: int) -> tuple[Array, Array]:
    """Each [B, S] -> [blocks, B, block]."""
    segments, positions = (_pad_queries(x, block) for x in ids)
    split = (segments.shape[0], -1, block)
    return segments.reshape(split).swapaxes(0, 1), positions.reshape(split).swapaxes(0, 1)
