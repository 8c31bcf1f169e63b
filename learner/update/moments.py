"""Count, mean, spread and extremes of numbers that arrive in parts."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments:
    """Enough of some numbers for their mean, std, minimum and maximum; merges exactly.

    Moments, not sums: a float32 sum of squares loses the variance of large numbers (Chan et al. 1979).
    """

    count: Float32[Array | np.ndarray, ""]
    mean: Float32[Array | np.ndarray, ""]
    """0 of none."""
    sum_squares: Float32[Array | np.ndarray, ""]
    """Sum of (x - mean)^2."""
    minimum: Float32[Array | np.ndarray, ""]
    """inf of none."""
    maximum: Float32[Array | np.ndarray, ""]
    """-inf of none."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Moments":
        """The moments of some numbers on the host."""
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
    def zeros(cls) -> "Moments":
        """The moments of nothing on the device: the neutral element of `merge`."""
        return jax.tree.map(jnp.asarray, cls.of([]))

    @property
    def std(self) -> Array:
        """The population's standard deviation; 0 of none."""
        return jnp.sqrt(self.sum_squares / jnp.maximum(self.count, 1))

    @property
    def extremes(self) -> tuple[Array, Array]:
        """Minimum and maximum; NaN of none."""
        is_any = self.count > 0
        return jnp.where(is_any, self.minimum, jnp.nan), jnp.where(is_any, self.maximum, jnp.nan)


def merge(a: Moments, b: Moments) -> Moments:
    """Of both together (Chan, Golub, LeVeque 1979): M2 = M2_a + M2_b + (mean_b - mean_a)^2 n_a n_b / n."""
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
