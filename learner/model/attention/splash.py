"""Attention on TPUs: splash kernel with block tables for packed rows.

Splash (sparse flash) is a Pallas kernel that takes segment ids and reads grouped key heads without copies. It walks a
static grid of block pairs and reads two tables in scalar memory: `block_mask`, 0 for a pair to skip, and `data_next`,
the block to fetch. `splash.make_splash_mha` fills them from the causal or window mask. This module also removes pairs
whose queries and keys share no segment (padding counts as none), in forward and backward passes, from each batch's
data. The kernel still masks by position and segment within a pair, so an unnecessary pair costs time and does not
change the result. A skipped step still takes its turn in the grid.

One table serves all rows on a device, so a pair is removed if it is empty in every row. One table per row is not
practical: for a `vmap` over tables Pallas makes a loop with copies of every row. Rows concatenated into one cost copies
too: compiled for v5e and v5p, two rows of 8k to 32k tokens took 24 to 30% more cycles outside of the kernels, and up to
28% more memory.

A fused backward pass writes one partial dq per key block, S / block copies of the queries: 32 at 32k tokens, 7 GB for
Qwen2.5-7B. Rows of more than `_MAX_DQ_COPIES` key blocks compute dq in a separate pass, which the later fork in
Tokamax (0.0.17) lacks; which of the two is faster is not measured.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Float, Int

from learner.model.attention.xla import ATTENTION


def skip_blocks(
    kernel: splash.SplashAttentionKernel, query_segments: Int[Array, "B Sq"], key_segments: Int[Array, "B S"]
) -> splash.SplashAttentionKernel:
    """Returns the kernel without the block pairs that share no segment in any row.

    Segment 0 is padding. The Sq queries may be a share of a row of S tokens.
    """
    sizes: splash.BlockSizes = kernel.kwargs["block_sizes"]
    # All passes use the same block size (`block_sizes`).
    meets = blocks_that_meet(query_segments, key_segments, sizes.block_q, sizes.block_kv).any(0)
    forward, dq, dkv = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    assert dkv is not None
    return splash.SplashAttentionKernel(
        by_query_block(forward, meets), dq and by_query_block(dq, meets), by_key_block(dkv, meets), **kernel.kwargs
    )


def blocks_that_meet(
    query_segments: Int[Array, "B Sq"], key_segments: Int[Array, "B S"], block_q: int, block_kv: int
) -> Bool[Array, "B T U"]:
    """Returns True per (query block, key block) that share a segment, causal or not; padding shares none.

    Compares the smallest and largest id of each block. This is exact if ids never decrease within a row, as in packed
    rows. In any other order no pair is missed.
    """
    query_least, query_greatest = _bounds(query_segments, block_q)
    key_least, key_greatest = _bounds(key_segments, block_kv)
    return (query_least[:, :, None] <= key_greatest[:, None]) & (key_least[:, None] <= query_greatest[:, :, None])


def by_query_block(table: MaskInfo, meets: Bool[Array, "T U"]) -> MaskInfo:
    """Returns the block table of the forward or dq kernel, which visits only pairs of blocks that attend.

    Args:
      table: static table of the kernel, [1, T, W]: up to W key blocks for each of T query blocks. W is less than U if
        a sliding window makes the grid narrower.
      meets: True where any query of block t attends to any key of block u, [T, U].
    """
    may_run, named = _static(table)
    run = may_run & jnp.take_along_axis(meets, named, 1)
    return _replace(table, run, fetched(run, named))


def by_key_block(table: MaskInfo, meets: Bool[Array, "T U"]) -> MaskInfo:
    """Returns the block table [1, W, U] of the dkv kernel, with W query blocks per key block; see `by_query_block`."""
    may_run, named = _static(table)
    run = may_run & jnp.take_along_axis(meets, named, 0)
    return _replace(table, run, fetched(run.T, named.T).T)


def fetched(run: Bool[Array, "L W"], named: Int[Array, "L W"]) -> Int[Array, "L W"]:
    """Returns the block to hold at each step: the block of the next step that runs.

    The next block is thus fetched during skipped steps. After the last step it is the pass's first block again (for the
    next head), as in JAX's tables. Relies on ascending blocks in a line, and ascending first blocks. Otherwise a
    skipped step may fetch another block, which costs only time.
    """
    none = jnp.iinfo(jnp.int32).max
    block = lax.cummin(jnp.where(run, named, none), axis=1, reverse=True)
    first = block[:, 0]
    first_of_later_lines = lax.cummin(jnp.append(first[1:], none), reverse=True)
    for otherwise in (first_of_later_lines[:, None], first.min(), 0):
        block = jnp.where(block == none, otherwise, block)
    return block


def _bounds(segments: Int[Array, "B S"], block: int) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """Returns (smallest, largest) id of each block's real tokens; padding overlaps nothing (smallest > largest)."""
    blocks = segments.reshape(len(segments), -1, block)
    real, ids = blocks != 0, jnp.iinfo(blocks.dtype)
    return jnp.where(real, blocks, ids.max).min(-1), jnp.where(real, blocks, ids.min).max(-1)


def _static(table: MaskInfo) -> tuple[Array, Array]:
    """Returns (True if the static mask keeps the entry, the block that it names) per entry."""
    assert table.block_mask is not None and table.data_next is not None
    return jnp.asarray(table.block_mask[0]) > 0, jnp.asarray(table.data_next[0], jnp.int32)


def _replace(table: MaskInfo, run: Array, block: Array) -> MaskInfo:
    """Returns the table with new entries in its own dtypes, the smallest that fit: scalar memory is scarce."""
    assert table.data_next is not None and table.block_mask is not None
    return table._replace(
        block_mask=run.astype(table.block_mask.dtype)[None], data_next=block.astype(table.data_next.dtype)[None]
    )


LANES = 128
"""Width of a vector register; token counts are multiples of it."""
MAX_BLOCK = 1024
_MAX_DQ_COPIES = 4


def row_multiple(length: int, shards: int) -> int:
    """Returns the divisor that a row's length needs for `shards` of well-sized blocks, in tokens."""
    return shards * (LANES if length <= shards * MAX_BLOCK else 512)


def block_sizes(num_queries: int, length: int, block: int | None) -> splash.BlockSizes:
    """Returns tiles for `num_queries` of a row's `length` tokens.

    Large tiles use the matrix unit well and small ones skip more of the causal half. The default is an eighth of the
    row, from 512 to 1024 tokens. Published tuned v6e configurations use 2048 everywhere, but with a raised VMEM limit
    (`--xla_tpu_scoped_vmem_limit_kib`). 1024 compiles on v5e, v5p and v6e with the default limit.
    """
    wanted = block or min(max(length // 8, 512), MAX_BLOCK)
    query, key = _divisor(num_queries, wanted), _divisor(length, wanted)
    fused = length // key <= _MAX_DQ_COPIES
    return splash.BlockSizes(
        block_q=query,
        block_kv=key,
        block_kv_compute=_divisor(key, 512),
        block_q_dkv=query,
        block_kv_dkv=key,
        block_kv_dkv_compute=_divisor(key, 512),
        block_q_dq=None if fused else query,
        block_kv_dq=None if fused else key,
        use_fused_bwd_kernel=fused,
    )


def _divisor(length: int, wanted: int) -> int:
    return next(n for n in range(max(wanted // LANES, 1) * LANES, 0, -LANES) if length % n == 0)


@functools.lru_cache(maxsize=64)
def splash_kernel(
    length: int,
    *,
    shards: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int | None = None,
    interpret: bool = False,
) -> splash.SplashAttentionKernel:
    """Returns the kernel for rows of `length` tokens, with NumPy tables so that it can be cached between traces.

    One mask serves every head. With `shards` > 1 each device has length / shards queries and all keys, and the kernel's
    `manual_sharding_spec` splits its tables.
    """
    shape = (length, length)
    mask = (
        masks.CausalMask(shape, shard_count=shards)
        if window is None
        else masks.LocalMask(shape, (window - 1, 0), 0, shard_count=shards)
    )
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask]),
            block_sizes=block_sizes(length // shards, length, block),
            head_shards=1,
            residual_checkpoint_name=ATTENTION,
            attn_logits_soft_cap=soft_cap,
            q_seq_shards=shards,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def splash_attention(
    q: Float[Array, "B Sq H hd"],
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    query_segments: Int[Array, "B Sq"],
    key_segments: Int[Array, "B S"],
    *,
    kernel: splash.SplashAttentionKernel,
    scale: float,
) -> Float[Array, "B Sq H hd"]:
    """Computes `dispatch.attention` on one device; `kernel` defines the mask and the device's share of queries."""
    head_dim = q.shape[-1]
    q, k, v = (_pad_head(x) for x in (q, k, v))
    # The kernel treats padding as another segment; zero queries keep its results finite.
    real = (query_segments != 0)[..., None, None]
    q = jnp.where(real, q.astype(jnp.float32) * scale, 0.0).astype(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    run: Any = skip_blocks(kernel, query_segments, key_segments)
    if len(q) == 1:
        # Without a batch dim of one XLA copies less.
        out = run(q[0], k[0], v[0], splash.SegmentIds(q=query_segments[0], kv=key_segments[0]))[None]
    else:
        out = jax.vmap(run)(q, k, v, splash.SegmentIds(q=query_segments, kv=key_segments))
    out = out.swapaxes(1, 2)[..., :head_dim]
    # Skipped query blocks of padding hold 0 / 0.
    return jnp.where(real, out, jnp.zeros((), out.dtype))


def _pad_head(x: Array) -> Array:
    """Pads heads with zeros to a whole register: zeros do not change scores, and their outputs are dropped."""
    wanted = math.ceil(x.shape[-1] / LANES) * LANES
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, wanted - x.shape[-1])])
