"""What the learner's jitted functions carry from one call to the next."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from learner.model.decoder import Params
from learner.update.diagnostics import Stats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulator:
    """The sums of the optimizer step that is being filled; all zero right after `apply`."""

    grads: Params
    """Gradient of the weighted loss sum, float32, shaped and sharded like the parameters."""
    denominator: Float32[Array, ""]
    """What the sums are divided by, once, at `apply`."""
    loss: Float32[Array, ""]
    """Weighted sum of token losses."""
    stats: Stats

    @classmethod
    def zeros(cls, params: Params) -> "Accumulator":
        """Nothing accumulated."""
        return cls(
            grads=jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            denominator=jnp.float32(0),
            loss=jnp.float32(0),
            stats=Stats.zeros(),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The learner's whole state on the devices."""

    params: Params
    opt_state: optax.OptState
    step: Int32[Array, ""]
    """Updates so far, each of rounds.epochs calls of `apply`: the version of the parameters. It advances on a skipped
    one too, so that versions stay contiguous and an update's groups always belong to one step."""
    skipped_updates: Int32[Array, ""]
    """Calls of `apply` that changed nothing because the loss or the gradient was not finite."""
    accumulator: Accumulator


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        skipped_updates=jnp.int32(0),
        accumulator=Accumulator.zeros(params),
    )
