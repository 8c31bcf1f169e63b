"""The optimizer with global-norm clipping, warm-up and a schedule, as one optax transformation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from configs.sections import OptimizerConfig

_NOT_DECAYED = ("norm", "bias")


def learning_rate(count: ArrayLike, config: OptimizerConfig, *, num_steps: int) -> Array:
    """The rate of the optimizer step that `count` applied ones came before.

    The warm-up rises as (count + 1) / warmup_steps, so that no step is wasted at rate 0. Then the schedule
    falls over the steps that are left of `num_steps` (cosine: (1 + cos(pi x)) / 2, linear: 1 - x) and would reach 0
    one step after the last.
    """
    count = jnp.asarray(count, jnp.float32)
    warmup = jnp.minimum((count + 1) / max(config.warmup_steps, 1), 1.0)
    x = jnp.clip((count - config.warmup_steps) / max(num_steps - config.warmup_steps, 1), 0.0, 1.0)
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


def make_optimizer(config: OptimizerConfig, *, num_steps: int) -> optax.GradientTransformation:
    """Clips the global norm, then Adam or Adafactor, both with AdamW's decoupled weight decay.

    Adam: Kingma and Ba, 2015; the decay: Loshchilov and Hutter, 2019; the factored second moment, with updates
    clipped to a root mean square of 1: Shazeer and Stern, 2018. The schedule counts applied steps of the run's
    `num_steps`. Its state is in float32 but for `mu_dtype`, whatever the parameters are kept in: of a second moment in
    bfloat16 nothing below 1 / 256 is ever forgotten. So are the gradients and parameters that it wants.
    """
    chain = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        _SCALES[config.name](config),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(lambda count: learning_rate(count, config, num_steps=num_steps)),
    )
    return optax.GradientTransformation(lambda params: chain.init(wide(params)), chain.update)


def wide(params: optax.Params) -> optax.Params:
    """Returns the parameters in float32."""
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


_SCALES: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda c: optax.scale_by_adam(b1=c.beta1, b2=c.beta2, eps=c.eps, mu_dtype=c.mu_dtype),
    "adafactor": lambda c: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
}
"""By `OptimizerConfig.name`."""
