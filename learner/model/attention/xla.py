"""Flash attention in XLA ops, with a custom derivative.

Flash attention (Dao et al. 2022, algorithm 1; backward: Dao 2023, algorithm 2). The forward pass saves the output and
the log-sum-exp of each query, and the backward pass recomputes the weights, so no [S, S] array exists. Queries and keys
are split into blocks. The custom derivative allows loop bounds that are known only at run time. The loop over key
blocks starts at the first key that any of the block's queries sees (segments are contiguous) and ends at the diagonal.
A query block of padding has no iterations.

The query heads of one key head are stacked, so a block is one [G * block, hd] x [hd, block] product per key head. On
two CPU threads this measured faster than one product per query head, than unbatched products, and than larger blocks,
which compute more masked pairs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

ATTENTION = "attention"
"""Checkpoint name of the output and softmax normalizer of the splash and xla paths. cuDNN saves nothing under it, so
remat `attention` equals `full` there."""


CPU_BLOCK = 64
DEFAULT_BLOCK = 512
"""Block off the CPU, where a loop iteration costs more than masked pairs."""


_MASKED = -1e30
"""Score of masked pairs: below every real score, and finite so that differences are never NaN."""
_FLOOR = -1e20
"""Initial running maximum: exp(_MASKED - _FLOOR) is exactly 0, so masked pairs never count."""


class _Blocks(NamedTuple):
    """Block pairs to compute and the ids that mask them, for T query blocks and U key blocks over all rows."""

    query_segments: Int[Array, "T block"]
    query_prefixes: Int[Array, "T block"] | None
    key_segments: Int[Array, "U block"]
    query_index: Int[Array, "T block"]
    """Position of each query in its whole row."""
    key_index: Int[Array, "U block"]
    begin: Int[Array, " T"]
    """First key block (of U) that a query block sees."""
    end: Int[Array, " T"]
    """Index after the last key block that a query block sees."""


def xla_attention(
    q: Float[Array, "B Sq H hd"],
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    query_segments: Int[Array, "B Sq"],
    key_segments: Int[Array, "B S"],
    *,
    query_offset: ArrayLike = 0,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int = CPU_BLOCK,
    prefixes: Int[Array, "B S"] | None = None,
) -> Float[Array, "B Sq H hd"]:
    """Computes `learner.model.attention.dispatch.attention` on one device; queries may be a slice of the row.

    The queries are tokens query_offset .. query_offset + Sq of each row; keys and values are of the whole rows.
    `prefixes` are the `prefix_ids` of `attention`, and require whole rows and no window.
    """
    (batch, num_queries, num_heads, head_dim), num_kv = q.shape, k.shape[2]
    block = min(block, -(-k.shape[1] // 8) * 8)
    q, query_segments = _pad(q, block), _pad(query_segments, block)
    k, v, key_segments = _pad(k, block), _pad(v, block), _pad(key_segments, block)
    prefixes = None if prefixes is None else _pad(prefixes, block)
    blocks = _plan(query_segments, key_segments, query_offset, window, block, prefixes)
    # [B, T/B, block, K, G, hd] -> [K, T, G * block, hd], with the query heads of a key head stacked.
    queries = q.reshape(batch, -1, block, num_kv, num_heads // num_kv, head_dim).transpose(3, 0, 1, 4, 2, 5)
    queries = queries.reshape(num_kv, -1, num_heads // num_kv * block, head_dim)
    keys, values = (x.reshape(-1, num_kv, head_dim).swapaxes(0, 1) for x in (k, v))
    out: Any = _flash(queries, keys, values, blocks, scale, window, soft_cap)
    out = out.reshape(num_kv, batch, -1, num_heads // num_kv, block, head_dim).transpose(1, 2, 4, 0, 3, 5)
    return out.reshape(batch, -1, num_heads, head_dim)[:, :num_queries]


def _pad(x: Array, block: int) -> Array:
    """Pads tokens with zeros (segment 0) to a whole number of blocks."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))


def _plan(
    query_segments: Array,
    key_segments: Array,
    offset: ArrayLike,
    window: int | None,
    block: int,
    prefixes: Array | None = None,
) -> _Blocks:
    """Returns the range of key blocks of each query block; a segment with a prefix starts at its prefix."""
    (batch, num_queries), num_keys = query_segments.shape, key_segments.shape[1]
    key_index = jnp.broadcast_to(jnp.arange(num_keys, dtype=jnp.int32), key_segments.shape)
    families = key_segments if prefixes is None else jnp.where(prefixes != 0, prefixes, key_segments)
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), families[:, 1:] != families[:, :-1]], 1)
    segment_start = lax.cummax(jnp.where(begins, key_index, 0), axis=1)
    query_index = jnp.arange(num_queries, dtype=jnp.int32) + jnp.asarray(offset, jnp.int32)
    # A query after the last key is padding.
    first = jnp.take(segment_start, jnp.minimum(query_index, num_keys - 1), axis=1)
    query_index = jnp.broadcast_to(query_index, query_segments.shape)
    if window is not None:
        first = jnp.maximum(first, query_index - (window - 1))

    def split(x: Array) -> Array:
        return x.reshape(-1, block)

    real = split(query_segments) != 0
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32) * (num_keys // block), num_queries // block)
    begin = jnp.where(real, split(first), num_keys).min(1) // block
    end = jnp.where(real, split(query_index), -1).max(1) // block + 1
    return _Blocks(
        query_segments=split(query_segments),
        query_prefixes=None if prefixes is None else split(prefixes),
        key_segments=split(key_segments),
        query_index=split(query_index),
        key_index=split(key_index),
        begin=row + begin,
        end=row + end,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _flash(q, k, v, blocks: _Blocks, scale: float, window: int | None, soft_cap: float | None) -> Array:
    return _flash_forward(q, k, v, blocks, scale, window, soft_cap)[0]


def _flash_forward(q, k, v, blocks: _Blocks, scale: float, window: int | None, soft_cap: float | None):
    num_kv, num_query_blocks, rows, head_dim = q.shape
    size = blocks.key_segments.shape[1]

    def one_query_block(_, t):
        query = _take(q, t)

        def one_key_block(u, sums):
            mixed, peak, total = sums
            scores = _scores(query, _keys(k, u, size), blocks, t, u, scale, window, soft_cap)
            higher = jnp.maximum(peak, scores.max(-1, keepdims=True))
            weights, shrink = jnp.exp(scores - higher), jnp.exp(peak - higher)
            mixed = mixed * shrink + _matmul("krs,ksd->krd", weights.astype(v.dtype), _keys(v, u, size))
            return mixed, higher, total * shrink + weights.sum(-1, keepdims=True)

        zeros = jnp.zeros((num_kv, rows, 1), jnp.float32)
        start = jnp.zeros((num_kv, rows, head_dim), jnp.float32), zeros + _FLOOR, zeros
        mixed, peak, total = lax.fori_loop(blocks.begin[t], blocks.end[t], one_key_block, start)
        # Padding sums to 0. An output and log-sum-exp of 0 make its weights exactly 0 in the backward pass.
        real = total > 0
        out = jnp.where(real, mixed / jnp.where(real, total, 1.0), 0.0)
        return None, (out.astype(q.dtype), jnp.where(real, peak + jnp.log(total), 0.0))

    _, (out, log_totals) = lax.scan(one_query_block, None, jnp.arange(num_query_blocks))
    out, log_totals = checkpoint_name(out.swapaxes(0, 1), ATTENTION), checkpoint_name(log_totals, ATTENTION)
    return out, (q, k, v, blocks, out, log_totals)


def _flash_backward(scale: float, window: int | None, soft_cap: float | None, saved: tuple[Any, ...], d_out):
    q, k, v, blocks, out, log_totals = saved
    num_kv, num_query_blocks, rows, head_dim = q.shape
    size = blocks.key_segments.shape[1]

    def one_query_block(d_keys_values, xs):
        t, log_total = xs
        query, d_mixed = _take(q, t), _take(d_out, t)
        # d softmax: sum_s P_s dP_s equals out . d_out, which is cheaper to compute.
        row_dot = (_take(out, t).astype(jnp.float32) * d_mixed).sum(-1, keepdims=True)

        def one_key_block(u, sums):
            d_query, d_keys, d_values = sums
            keys = _keys(k, u, size)
            scores = _scores(query, keys, blocks, t, u, scale, window, soft_cap)
            weights = jnp.exp(scores - log_total)
            d_weights = _matmul("krd,ksd->krs", d_mixed, _keys(v, u, size))
            d_scores = weights * (d_weights - row_dot) * scale
            if soft_cap is not None:
                # d tanh; masked scores are far below the cap and have weight 0.
                d_scores *= 1 - jnp.square(jnp.maximum(scores, -soft_cap) / soft_cap)
            d_scores = d_scores.astype(q.dtype)
            d_keys = _add(d_keys, u, _matmul("krs,krd->ksd", d_scores, query))
            d_values = _add(d_values, u, _matmul("krs,krd->ksd", weights.astype(v.dtype), d_mixed))
            return d_query + _matmul("krs,ksd->krd", d_scores, keys), d_keys, d_values

        start = jnp.zeros((num_kv, rows, head_dim), jnp.float32), *d_keys_values
        d_query, *rest = lax.fori_loop(blocks.begin[t], blocks.end[t], one_key_block, start)
        return tuple(rest), d_query.astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (dk, dv), dq = lax.scan(one_query_block, zeros, (jnp.arange(num_query_blocks), log_totals))
    return dq.swapaxes(0, 1), dk.astype(k.dtype), dv.astype(v.dtype), None


_flash.defvjp(_flash_forward, _flash_backward)


def _scores(
    query: Array, keys: Array, blocks: _Blocks, t, u, scale: float, window: int | None, soft_cap: float | None
) -> Array:
    """Returns [K, G * block, hd] x [K, block, hd] -> float32 [K, G * block, block], `_MASKED` at masked keys."""
    q_segment, k_segment = blocks.query_segments[t][:, None], blocks.key_segments[u][None]
    distance = blocks.query_index[t][:, None] - blocks.key_index[u][None]
    is_own = q_segment == k_segment
    if blocks.query_prefixes is not None:
        is_own |= (blocks.query_prefixes[t][:, None] == k_segment) & (k_segment != 0)
    mask = is_own & (q_segment != 0) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    scores = _matmul("krd,ksd->krs", query, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    num_kv, rows, size = scores.shape
    grouped = scores.reshape(num_kv, -1, mask.shape[0], size)
    return jnp.where(mask, grouped, _MASKED).reshape(num_kv, rows, size)


def _matmul(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _take(x: Array, t) -> Array:
    """Returns query block t of [K, T, G * block, hd]."""
    return lax.dynamic_index_in_dim(x, t, 1, keepdims=False)


def _keys(x: Array, u, size: int) -> Array:
    """Returns key block u of [K, U * block, hd]."""
    return lax.dynamic_slice_in_dim(x, u * size, size, 1)


def _add(x: Array, u, update: Array) -> Array:
    size = update.shape[1]
    return lax.dynamic_update_slice_in_dim(x, _keys(x, u, size) + update, u * size, 1)
