"""Per-token losses: pure functions, one equation each, to be minimised.

Every loss takes the current logprobs, the behaviour logprobs (the engine's), the advantages and the
loss mask, all `[rows, seq]` in nats and aligned at the token itself, and returns the loss of each token
(exactly 0 where the mask is False) and whether the correction bit there. Averaging is not done here:
`packing.py` gives each token its weight, `step.py` sums and divides once an update.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, jaxtyped

from configs.schema import LossConfig

MAX_LOG_RATIO = 20.0
"""Cap on log(pi / mu) inside an unclipped ratio. e^20 = 4.9e8 is far beyond any usable ratio and far below
float32's overflow; a token over it gets no gradient instead of an infinite one."""


class TokenLoss(NamedTuple):
    """What a loss says of each token."""

    loss: Float[Array, "B S"]
    clipped: Bool[Array, "B S"]
    """Where the correction changed the token's gradient; its mean over loss tokens is the clip fraction."""


@jaxtyped(typechecker=beartype)
def truncated_is_loss(
    logprobs: Float[Array, "B S"],
    behavior_logprobs: Float[Array, "B S"],
    advantages: Float[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    *,
    max_weight: float,
) -> TokenLoss:
    """REINFORCE loss with truncated importance weights (PipelineRL, eq. 5).

    l_t = -min(c, pi_t / mu_t) A_t log pi_t, the weight held constant.

    Raises:
      ValueError: max_weight (c) is not positive.
    """
    if max_weight <= 0:
        raise ValueError(f"max_weight must be > 0, got {max_weight}")
    log_w = jnp.where(loss_mask, logprobs - behavior_logprobs, 0.0)
    log_max = jnp.log(jnp.float32(max_weight))
    # exp(min(x, log c)) is min(c, exp(x)) without the overflow.
    weight = jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_w, log_max)))
    loss = -weight * advantages * logprobs
    return TokenLoss(jnp.where(loss_mask, loss, 0.0), loss_mask & (log_w > log_max))


@jaxtyped(typechecker=beartype)
def grpo_clip_loss(
    logprobs: Float[Array, "B S"],
    behavior_logprobs: Float[Array, "B S"],
    advantages: Float[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Clipped surrogate loss of PPO and GRPO; clip_high > clip_low is DAPO's clip-higher.

    l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), r_t = exp(log pi_t - log mu_t).

    Raises:
      ValueError: the bounds are not 0 <= clip_low <= 1, clip_high >= 0.
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"want 0 <= clip_low <= 1 and clip_high >= 0, got {clip_low} and {clip_high}")
    log_ratio = jnp.where(loss_mask, logprobs - behavior_logprobs, 0.0)
    ratio = jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))
    free = ratio * advantages
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    loss = -jnp.minimum(free, bounded)
    return TokenLoss(jnp.where(loss_mask, loss, 0.0), loss_mask & (bounded < free))


def entropy_bonus(entropy: Float[Array, "B S"], loss_mask: Bool[Array, "B S"], *, coef: float) -> Float[Array, "B S"]:
    """The term -coef H(pi_t) that an entropy bonus adds to a token's loss."""
    return jnp.where(loss_mask, -coef * entropy, 0.0)


LossFn = Callable[
    [Float[Array, "B S"], Float[Array, "B S"], Float[Array, "B S"], Bool[Array, "B S"], LossConfig], TokenLoss
]

LOSSES: dict[str, LossFn] = {
    "truncated_is": lambda logp, mu, adv, mask, config: truncated_is_loss(
        logp, mu, adv, mask, max_weight=float(config.max_weight)
    ),
    "grpo_clip": lambda logp, mu, adv, mask, config: grpo_clip_loss(
        logp, mu, adv, mask, clip_low=float(config.clip_low), clip_high=float(config.clip_high)
    ),
}
"""By `LossConfig.name`."""


def token_loss(
    logprobs: Float[Array, "B S"],
    entropy: Float[Array, "B S"],
    behavior_logprobs: Float[Array, "B S"],
    advantages: Float[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    config: LossConfig,
) -> TokenLoss:
    """The configured loss of each token, entropy bonus included."""
    result = LOSSES[config.name](logprobs, behavior_logprobs, advantages, loss_mask, config)
    if config.entropy_coef == 0:
        return result
    bonus = entropy_bonus(entropy, loss_mask, coef=config.entropy_coef)
    return result._replace(loss=result.loss + bonus)
