"""Packed causal attention on TPU: the splash kernel that comes with JAX.

Splash (sparse flash) is a Pallas kernel that takes segment ids and reads grouped key heads without copies of them. It
skips, forward and backward, the blocks that the causal or window mask leaves empty, and those whose queries and keys
have no segment in common in any of a device's rows, padding being none: its tables are made from each batch
(`segment_blocks.py`). A step that is skipped still takes its turn in the grid, without work.

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
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from learner.model.attention.segment_blocks import skip_blocks
from learner.model.remat import ATTENTION

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
