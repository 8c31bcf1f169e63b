"""AdamW with global-norm clipping, warm-up and a schedule, as one optax transformation."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from configs.schema import OptimizerConfig

_NOT_DECAYED = ("norm", "bias")


def learning_rate(count: ArrayLike, config: OptimizerConfig, *, num_updates: int) -> Array:
    """The rate of the update that `count` applied updates came before.

    The warm-up rises as (count + 1) / warmup_steps, so that no update is wasted at rate 0. Then the schedule
    falls over the updates that are left (cosine: (1 + cos(pi x)) / 2, linear: 1 - x) and would reach 0 one
    update after the last.
    """
    count = jnp.asarray(count, jnp.float32)
    warmup = jnp.minimum((count + 1) / max(config.warmup_steps, 1), 1.0)
    x = jnp.clip((count - config.warmup_steps) / max(num_updates - config.warmup_steps, 1), 0.0, 1.0)
    factors = {"constant": 1.0, "cosine": (1 + jnp.cos(jnp.pi * x)) / 2, "linear": 1 - x}
    return config.learning_rate * warmup * factors[config.schedule]


def decay_mask(params: optax.Params) -> optax.Params:
    """True for the parameters that weight decay shrinks: not for norms and biases.

    By name, since a stacked norm is a matrix ([layers, dim]).
    """

    def decays(path: jax.tree_util.KeyPath, _: object) -> bool:
        name = jax.tree_util.keystr(path).lower()
        return not any(part in name for part in _NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig, *, num_updates: int) -> optax.GradientTransformation:
    """Clips the global norm, then AdamW (Loshchilov and Hutter, 2019); the schedule counts applied ones."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            lambda count: learning_rate(count, config, num_updates=num_updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
