"""Quantiles of log-ratios that arrive in parts: a histogram with bins fixed in advance, so counts just add.

Bins are equally wide in asinh(x / SCALE), which is linear near 0 and logarithmic beyond: an engine's rounding
(1e-5 nats) and a policy that went astray (10 nats) are told apart by the same bins. A bin is read as its centre,
and the middle one's is exactly 0. That is off by at most RELATIVE_ERROR of |x|, or 2.1e-5 nats near 0.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

SCALE = 1e-3
"""nats"""
RANGE = 20.0
"""nats; whatever is beyond counts in the last bin of its side."""
HALF = 512
NUM_BINS = 2 * HALF + 1
WIDTH = math.asinh(RANGE / SCALE) / HALF
RELATIVE_ERROR = WIDTH / 2
"""0.0104; of w = e^x that is a factor of e^(0.0104 |x|) at most."""


def count_log_ratios(log_ratio: Float[Array, "B S"], where: Bool[Array, "B S"]) -> Int32[Array, " bins"]:
    """How many of them fall into each bin."""
    place = jnp.round(jnp.arcsinh(log_ratio / SCALE) / WIDTH)
    bins = jnp.clip(place, -HALF, HALF).astype(jnp.int32) + HALF

    # A histogram a row: rows are split over the mesh, so each device counts its own and the counts are summed.
    def one_row(bins: Array, where: Array) -> Array:
        return jax.ops.segment_sum(where.astype(jnp.int32), bins, num_segments=NUM_BINS)

    return jnp.sum(jax.vmap(one_row)(bins, where), axis=0)


def quantile(counts: Int32[Array, " bins"], percent: int) -> Float[Array, ""]:
    """The centre of the bin that holds the smallest value with at least `percent` % at or below it; NaN of none."""
    total = jnp.sum(counts)
    # ceil(total percent / 100) without the product, which would pass int32 at 21 million tokens.
    rank = total // 100 * percent + (total % 100 * percent + 99) // 100
    index = jnp.argmax(jnp.cumsum(counts) >= jnp.maximum(rank, 1))
    centre = SCALE * jnp.sinh((index - HALF) * WIDTH)
    return jnp.where(total > 0, centre, jnp.nan)
