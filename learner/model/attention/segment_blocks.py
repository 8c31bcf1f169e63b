"""Splash's tables for packed rows, from the segments in them: which pairs of blocks it computes.

Splash walks a static grid of block pairs and reads two tables in scalar memory: `block_mask`, 0 for a pair that is not
computed, and `data_next`, the block to hold by then. `splash.make_splash_mha` fills them from the causal or window
mask; here pairs whose segments don't meet are taken out as well, which only the data says. Within a pair the kernel
masks by position and segment as before, so a pair too many costs time and changes nothing.

One table serves all rows on a device, so a pair is taken out where it is empty in each of them; of one row it is exact.
A table a row can't be had: Pallas makes a loop with copies of every row of a `vmap` over tables, and rows laid end to
end as one (whose table could name each one's blocks) cost copies too: compiled for v5e and v5p, two rows of 8k to 32k
tokens took 24 to 30% more cycles outside of the kernels, and up to 28% more memory.

Nothing here is larger than a row or the tables: [blocks of queries, blocks of keys].
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Int


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
