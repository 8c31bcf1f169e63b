"""Estimates of KL(pi, pi_ref) from one token each (Schulman, "Approximating KL divergence").

With x = log pi_theta - log pi_ref of a token, in nats. The estimates are of the KL where the tokens are the
policy's own samples; tokens of an older policy are taken as they are, as in DeepSeekMath (eq. 4).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0
"""Cap on the logarithm of a ratio that nothing else bounds. e^20 = 4.9e8 is far beyond any usable ratio and far
below float32's overflow."""


def k1(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """k1 = x: unbiased, of either sign. As a loss its gradient is noise of mean zero on-policy."""
    return log_ratio


def k2(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """k2 = x^2 / 2: biased, never negative; as a loss its gradient is an unbiased one of KL(pi, pi_ref)."""
    return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """k3 = e^-x - 1 + x: unbiased, never negative (GRPO's penalty).

    Where pi is more than e^20 below pi_ref it goes on as its tangent: finite, and still pulling back.
    """
    x = jnp.maximum(log_ratio, -MAX_LOG_RATIO)
    # expm1 keeps the digits that e^-x - 1 loses at x near 0, where a run starts.
    return jnp.expm1(-x) + x - jnp.expm1(MAX_LOG_RATIO) * jnp.minimum(log_ratio + MAX_LOG_RATIO, 0.0)


KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}
"""By `LossConfig.kl_estimator`."""
