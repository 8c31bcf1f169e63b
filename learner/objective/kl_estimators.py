"""Estimators of a KL divergence from single samples: `LossConfig.kl_estimator` (Schulman, Approximating KL Divergence).

x = log pi - log pi_ref of a token. They estimate the KL if the policy sampled the tokens; tokens of an older policy are
used unchanged, as in DeepSeekMath (eq. 4).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_LOG_RATIO = 20.0
"""Cap on the log of a ratio without another bound. e^20 = 4.9e8 is far beyond usable ratios and far below float32
overflow."""


def k1(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns k1 = x: unbiased, of either sign. As a loss, its on-policy gradient is zero-mean noise."""
    return log_ratio


def k2(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns k2 = x^2 / 2: biased, never negative. As a loss, its gradient is unbiased for KL(pi, pi_ref)."""
    return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns k3 = e^-x - 1 + x: unbiased, never negative (GRPO's penalty).

    Below x = -20 it continues as its tangent, which is finite and still pulls pi back.
    """
    x = jnp.maximum(log_ratio, -MAX_LOG_RATIO)
    # expm1 keeps the digits that e^-x - 1 loses near x = 0, where a run starts.
    return jnp.expm1(-x) + x - jnp.expm1(MAX_LOG_RATIO) * jnp.minimum(log_ratio + MAX_LOG_RATIO, 0.0)


KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}
