"""Segment sums, moments and a log-ratio histogram that merge exactly.

Bins are equally wide in asinh(x / SCALE), which is linear near 0 and logarithmic beyond. The same bins therefore
resolve an engine's rounding (1e-5 nats) and a diverged policy (10 nats). A bin is read as its center; the middle bin's
is exactly 0. The error is at most RELATIVE_ERROR of |x|, or 2.1e-5 nats near 0.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

SCALE = 1e-3
"""Scale of the linear range, in nats."""
RANGE = 20.0
"""Largest resolved absolute value, in nats; values beyond count in the last bin of their side."""
HALF = 512
NUM_BINS = 2 * HALF + 1
WIDTH = math.asinh(RANGE / SCALE) / HALF
RELATIVE_ERROR = WIDTH / 2
"""Relative error of a bin's center, 0.0104: for w = e^x a factor of at most e^(0.0104 |x|)."""


def count_log_ratios(log_ratio: Float[Array, "B S"], where: Bool[Array, "B S"]) -> Int32[Array, " bins"]:
    """Counts the log ratios of each bin."""
    place = jnp.round(jnp.arcsinh(log_ratio / SCALE) / WIDTH)
    bins = jnp.clip(place, -HALF, HALF).astype(jnp.int32) + HALF

    # A histogram per row: rows are split over the mesh, so each device counts its own and the counts are summed.
    def one_row(bins: Array, where: Array) -> Array:
        return jax.ops.segment_sum(where.astype(jnp.int32), bins, num_segments=NUM_BINS)

    return jnp.sum(jax.vmap(one_row)(bins, where), axis=0)


def quantile(counts: Int32[Array, " bins"], percent: int) -> Float[Array, ""]:
    """Returns the center of the bin of the smallest value with at least `percent` % at or below it; NaN if empty."""
    total = jnp.sum(counts)
    # ceil(total percent / 100) without the product, which would pass int32 at 21 million tokens.
    rank = total // 100 * percent + (total % 100 * percent + 99) // 100
    index = jnp.argmax(jnp.cumsum(counts) >= jnp.maximum(rank, 1))
    centre = SCALE * jnp.sinh((index - HALF) * WIDTH)
    return jnp.where(total > 0, centre, jnp.nan)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """Moments of numbers, for their mean, std, minimum and maximum; they merge exactly.

    Moments instead of sums, because a float32 sum of squares loses the variance of large numbers (Chan et al. 1979).
    """

    count: Float32[Array | np.ndarray, ""]
    mean: Float32[Array | np.ndarray, ""]
    """Mean; 0 if empty."""
    sum_squares: Float32[Array | np.ndarray, ""]
    """Sum of (x - mean)^2."""
    minimum: Float32[Array | np.ndarray, ""]
    """Minimum; inf if empty."""
    maximum: Float32[Array | np.ndarray, ""]
    """Maximum; -inf if empty."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Moments":
        """Returns the moments of numbers on the host."""
        x = np.asarray(values, np.float64)
        mean = x.mean() if x.size else 0.0
        return cls(
            count=np.asarray(x.size, np.float32),
            mean=np.asarray(mean, np.float32),
            sum_squares=np.asarray(np.square(x - mean).sum(), np.float32),
            minimum=np.asarray(x.min(initial=np.inf), np.float32),
            maximum=np.asarray(x.max(initial=-np.inf), np.float32),
        )

    @classmethod
    def where(cls, values: Float[Array, "B S"], where: Bool[Array, "B S"]) -> "Moments":
        """Returns the moments of the numbers on the device at which `where` is True."""
        count = jnp.sum(where, dtype=jnp.float32)
        mean = jnp.sum(jnp.where(where, values, 0.0)) / jnp.maximum(count, 1)
        return cls(
            count=count,
            mean=mean,
            sum_squares=jnp.sum(jnp.where(where, jnp.square(values - mean), 0.0)),
            minimum=jnp.min(values, where=where, initial=jnp.inf),
            maximum=jnp.max(values, where=where, initial=-jnp.inf),
        )

    @classmethod
    def zeros(cls) -> "Moments":
        """Returns the moments of no numbers on the device: the neutral element of `merge`."""
        return jax.tree.map(jnp.asarray, cls.of([]))

    @property
    def std(self) -> Array:
        """Population standard deviation; 0 if empty."""
        return jnp.sqrt(self.sum_squares / jnp.maximum(self.count, 1))

    @property
    def extremes(self) -> tuple[Array, Array]:
        """Minimum and maximum; NaN if empty."""
        is_any = self.count > 0
        return jnp.where(is_any, self.minimum, jnp.nan), jnp.where(is_any, self.maximum, jnp.nan)


def merge(a: Moments, b: Moments) -> Moments:
    """Merges moments (Chan, Golub, LeVeque 1979): M2 = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / n."""
    count = a.count + b.count
    share = b.count / jnp.maximum(count, 1)
    delta = b.mean - a.mean
    return Moments(
        count=count,
        mean=a.mean + delta * share,
        sum_squares=a.sum_squares + b.sum_squares + delta**2 * a.count * share,
        minimum=jnp.minimum(a.minimum, b.minimum),
        maximum=jnp.maximum(a.maximum, b.maximum),
    )


def segment_sums(values: Float[Array, "B S"], segment_ids: Int[Array, "B S"]) -> Float[Array, "B segments"]:
    """Returns the sum of each segment's values, by segment id; column 0 is padding.

    A sequence has at least a prompt and a response token, so a row of S tokens has at most S / 2 sequences.
    """
    num_segments = values.shape[1] // 2 + 1

    def one_row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, num_segments=num_segments)

    return jax.vmap(one_row)(values, segment_ids)


def at_tokens(sums: Float[Array, "B segments"], segment_ids: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """Returns at each token the value of its segment, by the columns of `segment_sums`."""
    return jnp.take_along_axis(sums, segment_ids, axis=1)


def segment_means(
    values: Float[Array, "B S"], mask: Bool[Array, "B S"], segment_ids: Int[Array, "B S"]
) -> Float[Array, "B S"]:
    """Returns at each token the mean over the masked tokens of its segment; 0 if there are none."""
    sums = segment_sums(jnp.where(mask, values, 0.0), segment_ids)
    counts = segment_sums(mask.astype(jnp.float32), segment_ids)
    return at_tokens(sums / jnp.maximum(counts, 1), segment_ids)
