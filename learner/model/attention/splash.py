"""TPU splash kernel and its packed block tables.

Splash walks a static grid of block pairs and reads two tables in scalar memory: `block_mask`, 0 for a pair that is not
computed, and `data_next`, the block to hold by then. `splash.make_splash_mha` fills them from the causal or window
mask; here pairs whose segments don't meet are taken out as well, which only the data says. Within a pair the kernel
masks by position and segment as before, so a pair too many costs time and changes nothing.

One table serves all rows on a device, so a pair is taken out where it is empty in each of them; of one row it is exact.
A table a row can't be had: Pallas makes a loop with copies of every row of a `vmap` over tables, and rows laid end to
end as one (whose table could name each one's blocks) cost copies too: compiled for v5e and v5p, two rows of 8k to 32k
tokens took 24 to 30% more cycles outside of the kernels, and up to 28% more memory.

Nothing here is larger than a row or the tables: [blocks of queries, blocks of keys].

Splash (sparse flash) is a Pallas kernel that takes segment ids and reads grouped key heads without copies of them. It
skips, forward and backward, the blocks that the causal or window mask leaves empty, and those whose queries and keys
have no segment in common in any of a device's rows, padding being none: its tables are made from each batch
(`splash.py`). A step that is skipped still takes its turn in the grid, without work.

Tokamax (0.0.17) has a later fork of it, under `experimental` and with a fused backward only. A fused backward writes
one partial dq a key block, S / block copies of the queries: 32 at 32k tokens, 7 GB for Qwen2.5-7B. The kernel in JAX
can also make dq in a pass of its own and needs no further package, so it is the one here. Which is faster can only be
measured on a TPU.
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
    """The kernel without the pairs of blocks that meet in none of the rows.

    Args:
      kernel: for rows of Sq queries and S keys; its queries may be a share of a row.
      query_segments: 0 for padding; a segment's tokens are contiguous.
      key_segments: the same ids for the whole rows.
    """
    sizes: splash.BlockSizes = kernel.kwargs["block_sizes"]
    # The blocks of all passes are of one size (`block_sizes` of splash.py).
    meets = blocks_that_meet(query_segments, key_segments, sizes.block_q, sizes.block_kv).any(0)
    forward, dq, dkv = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    assert dkv is not None
    return splash.SplashAttentionKernel(
        by_query_block(forward, meets), dq and by_query_block(dq, meets), by_key_block(dkv, meets), **kernel.kwargs
    )


def blocks_that_meet(
    query_segments: Int[Array, "B Sq"], key_segments: Int[Array, "B S"], block_q: int, block_kv: int
) -> Bool[Array, "B T U"]:
    """Whether a block of queries and one of keys have a segment in common, causal or not; padding meets nothing.

    By the least and the greatest id of each: exact where the ids of a row never fall, as packing numbers them. In any
    other order no pair is missed.
    """
    query_least, query_greatest = _bounds(query_segments, block_q)
    key_least, key_greatest = _bounds(key_segments, block_kv)
    return (query_least[:, :, None] <= key_greatest[:, None]) & (key_least[:, None] <= query_greatest[:, :, None])


def by_query_block(table: MaskInfo, meets: Bool[Array, "T U"]) -> MaskInfo:
    """The table of the forward and the dq pass, [1, T, W]: a line for each query block, naming key blocks.

    W is less than U where a window lets the grid be narrower.
    """
    may_run, named = _static(table)
    run = may_run & jnp.take_along_axis(meets, named, 1)
    return _replace(table, run, fetched(run, named))


def by_key_block(table: MaskInfo, meets: Bool[Array, "T U"]) -> MaskInfo:
    """The table of the pass for keys and values, [1, W, U]: a column for each key block, naming query blocks."""
    may_run, named = _static(table)
    run = may_run & jnp.take_along_axis(meets, named, 0)
    return _replace(table, run, fetched(run.T, named.T).T)


def fetched(run: Bool[Array, "L W"], named: Int[Array, "L W"]) -> Int[Array, "L W"]:
    """The block to hold at each step of a pass through the lines: that of the first step from here on that runs.

    So the next block is on its way while steps without work go by. After the last step it is the pass' first block
    again (of the next head), as in JAX's tables. Relies on blocks ascending in a line, and the lines' first ones too;
    else a step without work may fetch another block, which costs time only.
    """
    none = jnp.iinfo(jnp.int32).max
    block = lax.cummin(jnp.where(run, named, none), axis=1, reverse=True)
    first = block[:, 0]
    first_of_later_lines = lax.cummin(jnp.append(first[1:], none), reverse=True)
    for otherwise in (first_of_later_lines[:, None], first.min(), 0):
        block = jnp.where(block == none, otherwise, block)
    return block


def _bounds(segments: Int[Array, "B S"], block: int) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """(least, greatest) id of each block's real tokens; without any they are out of order and overlap with none."""
    blocks = segments.reshape(len(segments), -1, block)
    real, ids = blocks != 0, jnp.iinfo(blocks.dtype)
    return jnp.where(real, blocks, ids.max).min(-1), jnp.where(real, blocks, ids.min).max(-1)


def _static(table: MaskInfo) -> tuple[Array, Array]:
    """(whether causal mask and window leave it anything, the block that it names then) of each entry."""
    assert table.block_mask is not None and table.data_next is not None
    return jnp.asarray(table.block_mask[0]) > 0, jnp.asarray(table.data_next[0], jnp.int32)


def _replace(table: MaskInfo, run: Array, block: Array) -> MaskInfo:
    """In the static table's types, the smallest that hold its blocks: scalar memory is scarce."""
    assert table.data_next is not None and table.block_mask is not None
    return table._replace(
        block_mask=run.astype(table.block_mask.dtype)[None], data_next=block.astype(table.data_next.dtype)[None]
    )


LANES = 128
"""Tokens come in multiples of this: the width of a vector register."""
MAX_BLOCK = 1024
_MAX_DQ_COPIES = 4


def row_multiple(length: int, shards: int) -> int:
    """What a row's length has to divide by to be cut into `shards` of well-sized blocks, in tokens."""
    return shards * (LANES if length <= shards * MAX_BLOCK else 512)


def block_sizes(num_queries: int, length: int, block: int | None) -> splash.BlockSizes:
    """Tiles for `num_queries` of a row's `length` tokens.

    Large tiles use the matrix unit well and small ones skip more of the causal half: an eighth of the row, from 512 to
    1024 tokens. Tuned v6e configurations are published with 2048 everywhere, but only with a raised VMEM limit
    (`--xla_tpu_scoped_vmem_limit_kib`); 1024 compiles on v5e, v5p and v6e with the default one.
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
    """The largest multiple of `LANES` up to `wanted` that divides `length`."""
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
    """The kernel for rows of `length` tokens, its tables as NumPy arrays, so that it can be kept between traces.

    The one mask serves every head. With `shards` > 1 each device has length / shards queries and all keys, and the
    kernel's tables are split by its own `manual_sharding_spec`.
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
    """`dispatch.attention` for one device; `kernel` knows the mask and which queries these are."""
    head_dim = q.shape[-1]
    q, k, v = (_pad_head(x) for x in (q, k, v))
    # The kernel takes padding for one more segment; zero queries keep what it computes there finite.
    real = (query_segments != 0)[..., None, None]
    q = jnp.where(real, q.astype(jnp.float32) * scale, 0.0).astype(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    run: Any = skip_blocks(kernel, query_segments, key_segments)
    if len(q) == 1:
        # XLA copies less than with a batch of one.
        out = run(q[0], k[0], v[0], splash.SegmentIds(q=query_segments[0], kv=key_segments[0]))[None]
    else:
        out = jax.vmap(run)(q, k, v, splash.SegmentIds(q=query_segments, kv=key_segments))
    out = out.swapaxes(1, 2)[..., :head_dim]
    # Query blocks of padding alone are skipped, and hold 0 / 0.
    return jnp.where(real, out, jnp.zeros((), out.dtype))


def _pad_head(x: Array) -> Array:
    """Zeros up to a whole register: they add nothing to a score, and their outputs are dropped."""
    wanted = math.ceil(x.shape[-1] / LANES) * LANES
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, wanted - x.shape[-1])])
