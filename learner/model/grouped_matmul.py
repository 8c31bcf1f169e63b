"""One matrix product for each run of rows: the experts' products.

`jax.lax.ragged_dot` runs everywhere, but not everywhere as a grouped product: XLA-CPU computes all experts by all rows,
and XLA for TPU does so for the gradient of the kernel (Qwen3-30B-A3B: 23 of 25 s of a micro-batch, compiled for v5p).
On a TPU it is therefore megablox, the Pallas kernel in JAX. On a GPU it is XLA's lowering, which nobody measured yet.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

GroupedMatmul = Callable[[Array, Array, Array], Array]
"""(rows [M, in], kernels [E, out, in], sizes [E]) -> [M, out]; what is after the last run is undefined."""

_TILE = (512, 1024, 768)
"""Rows, contraction, outputs of a tile, at most."""


def ragged(
    rows: Float[Array, "M d_in"], kernels: Float[Array, "E d_out d_in"], sizes: Int[Array, " E"]
) -> Float[Array, "M d_out"]:
    """By XLA's own operation, which contracts a kernel's middle dim."""
    return jax.lax.ragged_dot(rows, kernels.swapaxes(1, 2), sizes)


def megablox(
    rows: Float[Array, "M d_in"],
    kernels: Float[Array, "E d_out d_in"],
    sizes: Int[Array, " E"],
    *,
    tile: tuple[int, int, int] = _TILE,
    interpret: bool = False,
) -> Float[Array, "M d_out"]:
    """By the TPU's kernel; `interpret` runs it anywhere, for tests. Rows are padded to whole tiles."""
    from jax.experimental.pallas.ops.tpu.megablox import ops

    num_rows = rows.shape[0]
    # Sublanes of the narrowest dtype come in 16; a tile needs no more rows than there are.
    height = min(tile[0], -(-num_rows // 16) * 16)
    padded = jnp.pad(rows, ((0, -num_rows % height), (0, 0)))
    out = ops.gmm(padded, kernels, sizes, rows.dtype, (height, *tile[1:]), None, None, True, interpret)
    return out[:num_rows]


def grouped_matmul(platform: str) -> GroupedMatmul:
    """The one for a platform ("tpu", "gpu", "cpu")."""
    return megablox if platform == "tpu" else ragged
