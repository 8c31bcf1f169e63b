"""Packed causal attention on GPU without cuDNN: the Pallas (Triton) flash kernel that comes with JAX.

It takes segment ids and any float type, on any GPU that Triton serves. It skips the blocks after the diagonal but not
those between segments, knows no window, and reads one key head a query head, so grouped keys are repeated. Its
tiles are the library's defaults: not tuned on a card.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128
"""Tokens come in multiples of this."""


def pallas_attention(
    q: Float[Array, "B S H hd"],
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    segment_ids: Int[Array, "B S"],
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "B S H hd"]:
    """`learner.model.attention.dispatch.attention` for one device and no window."""
    # Imported here: it needs Triton's lowering, which a CPU or TPU machine may lack.
    from jax.experimental.pallas.ops.gpu import attention as kernels

    length, group = q.shape[1], q.shape[2] // k.shape[2]
    real = (segment_ids != 0)[..., None, None]
    # The kernel takes padding for one more segment; zero queries keep what it computes there finite.
    q = jnp.where(real, q, jnp.zeros((), q.dtype))
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    q, k, v, ids = (
        jnp.pad(x, [(0, 0), (0, -length % BLOCK)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v, segment_ids)
    )
    out: Any = kernels.mha(q, k, v, ids, sm_scale=scale, causal=True, interpret=interpret)
    return jnp.where(real, out[:, :length], jnp.zeros((), out.dtype))
