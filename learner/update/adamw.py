"""AdamW's step as one pass over each parameter: the mean, clipping, moments, decay and the update together.

The same numbers as the optax chain of `optimizer.make_optimizer`, whose state it takes and returns, but written so that
XLA needs few passes over memory. In the chain, the new parameter reads the old moments, which are overwritten in place
by the new ones, so XLA for CPU copies them first; here it reads the new ones, and each old array is read by that one
expression which replaces it. 16M parameters on two cores: 0.05 s instead of 0.12 s.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Float32

from configs.sections import OptimizerConfig
from learner.model.decoder import Params
from learner.update.optimizer import decay_mask, learning_rate
from learner.update.rounding import round_stochastically


def adamw_step(
    params: Params,
    sums: Params,
    opt_state: tuple[Any, ...],
    *,
    scale: Float32[Array, ""],
    num_steps: int,
    is_good: Bool[Array, ""],
    config: OptimizerConfig,
    words: Params,
) -> tuple[Params, tuple[Any, ...], Params]:
    """Steps AdamW (Loshchilov and Hutter, 2019, algorithm 2) where `is_good`, else hands everything back as it is.

    g = scale sums; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    p = p - rate_t (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p).

    It is computed in float32, whatever the arrays are kept in; parameters in bfloat16 are rounded stochastically.

    Args:
      params: the parameters.
      sums: accumulated gradient sums, float32, a tree like the parameters'.
      opt_state: of `optimizer.make_optimizer`'s chain for adamw.
      scale: what turns a sum into the clipped mean.
      num_steps: optimizer steps of the run, over which the rate's schedule goes.
      is_good: whether loss and gradient are finite.
      config: the betas, eps and the decay of what `optimizer.decay_mask` names.
      words: `rounding.rounding_words` of this step.

    Returns:
      parameters, state, and zeros in the shape of the sums.
    """
    adam = next(part for part in opt_state if isinstance(part, optax.ScaleByAdamState))
    schedule = next(part for part in opt_state if isinstance(part, optax.ScaleByScheduleState))
    rate = learning_rate(schedule.count, config, num_steps=num_steps)
    count = jnp.asarray(optax.safe_increment(adam.count))
    correction1, correction2 = (1 - beta ** count.astype(jnp.float32) for beta in (config.beta1, config.beta2))

    def one(p: Array, total: Array, mu: Array, nu: Array, decays: bool, word: Array) -> tuple[Array, ...]:
        g = total * scale
        # The old value stays where the sums are not finite; a select in the same pass costs nothing.
        first = jnp.where(is_good, config.beta1 * _wide(mu) + (1 - config.beta1) * g, _wide(mu))
        second = jnp.where(is_good, config.beta2 * _wide(nu) + (1 - config.beta2) * g * g, _wide(nu))
        step = first / correction1 / (jnp.sqrt(second / correction2) + config.eps)
        if decays and config.weight_decay:
            step += config.weight_decay * _wide(p)
        new = round_stochastically(jnp.where(is_good, _wide(p) - rate * step, _wide(p)), p.dtype, word)
        # 0, said as something that needs the new parameter: so the sums' buffer is free, and needs no copy either.
        zero = jnp.where(count < 0, new.astype(total.dtype), 0)
        return new, first.astype(mu.dtype), second.astype(nu.dtype), zero

    stepped = jax.tree.map(one, params, sums, adam.mu, adam.nu, decay_mask(params), words)
    new, mu, nu, zeros = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0,) * 4), stepped)

    def counted(part: Any) -> Any:
        if isinstance(part, optax.ScaleByAdamState):
            return optax.ScaleByAdamState(count=jnp.where(is_good, count, part.count), mu=mu, nu=nu)
        if isinstance(part, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(count=jnp.where(is_good, optax.safe_increment(part.count), part.count))
        return part

    return new, tuple(counted(part) for part in opt_state), zeros


def clip_scale(norm: Float32[Array, ""], max_norm: float) -> Float[Array, ""]:
    """What a gradient of that norm is multiplied with so that it has at most `max_norm` (Pascanu et al., 2013)."""
    return jnp.minimum(1.0, max_norm / norm)


def _wide(x: Array) -> Float32[Array, "..."]:
    return x.astype(jnp.float32)
