"""Sums over the sequences of packed rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def segment_sums(values: Float[Array, "B S"], segment_ids: Int[Array, "B S"]) -> Float[Array, "B segments"]:
    """The sum of each segment's values, by segment id; column 0 is padding's.

    A sequence has at least a prompt and a response token, so a row of S tokens has at most S / 2 of them.
    """
    num_segments = values.shape[1] // 2 + 1

    def one_row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, num_segments=num_segments)

    return jax.vmap(one_row)(values, segment_ids)


def segment_means(
    values: Float[Array, "B S"], mask: Bool[Array, "B S"], segment_ids: Int[Array, "B S"]
) -> Float[Array, "B S"]:
    """The mean over the masked tokens of a token's own segment, at each of its tokens; 0 where there are none."""
    sums = segment_sums(jnp.where(mask, values, 0.0), segment_ids)
    counts = segment_sums(mask.astype(jnp.float32), segment_ids)
    return jnp.take_along_axis(sums / jnp.maximum(counts, 1), segment_ids, axis=1)
