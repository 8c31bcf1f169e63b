"""Generalized advantage estimation over packed rows, and the loss of the critic's values: pure functions.

An action is a sampled token, or with turns a run of sampled tokens. Its state is all that precedes it, so the value of
a state includes no token of the action. Observed tokens are no actions: estimation steps over them, from an action to
the next one of its sequence, without a discount. The last action of a sequence ends the episode, also where a limit
truncated the response: nothing is bootstrapped, because the limit is part of the task and the response has its reward.

Advantages are not whitened. The mean and deviation of an update are unknown when its first micro-batch trains, and
those of a micro-batch or group would make the gradient depend on the packing.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import NamedTuple

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, jaxtyped


class Actions(NamedTuple):
    """First and last token of each action; the same for an action of one token."""

    starts: Bool[Array, "B S"]
    ends: Bool[Array, "B S"]


@jaxtyped(typechecker=beartype)
def actions_of(mask: Bool[Array, "B S"], segment_ids: Int[Array, "B S"], *, by_turn: bool) -> Actions:
    """Returns the actions of packed rows: sampled tokens, or runs of them within a segment with `by_turn`."""
    if not by_turn:
        return Actions(mask, mask)
    inner = mask[:, 1:] & mask[:, :-1] & (segment_ids[:, 1:] == segment_ids[:, :-1])
    return Actions(
        starts=mask & ~jnp.pad(inner, ((0, 0), (1, 0))),
        ends=mask & ~jnp.pad(inner, ((0, 0), (0, 1))),
    )


@jaxtyped(typechecker=beartype)
def gae(
    values: Float[Array, "B S"],
    rewards: Float[Array, "B S"],
    actions: Actions,
    segment_ids: Int[Array, "B S"],
    *,
    discount: float,
    gae_lambda: float,
) -> Float[Array, "B S"]:
    """Returns the advantages of packed rows (Schulman et al., 2016, eq. 16).

    A_n = delta_n + gamma lambda A_(n+1), delta_n = r_n + gamma V_(n+1) - V_n, over the actions n of a sequence, with A
    and V of 0 after the last. V is the value of the state before each token, read where an action starts; r is read
    where an action ends; gamma (`discount`) is per action. All tokens of an action have its advantage; other positions
    have no meaning. With gamma = lambda = 1 and one reward R at the end, A_n = R - V_n (PipelineRL, eq. 4).
    """
    size = values.shape[1]
    place = jnp.arange(size)

    def at(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, jnp.clip(index, 0, size - 1), axis=1)

    start = jax.lax.cummax(jnp.where(actions.starts, place, 0), axis=1)
    value = at(values, start)  # of its action, where one ends
    later = jax.lax.cummin(jnp.where(actions.ends, place, size), axis=1, reverse=True)
    after = jnp.pad(later[:, 1:], ((0, 0), (0, 1)), constant_values=size)
    is_followed = (after < size) & (at(segment_ids, after) == segment_ids)
    delta = rewards + discount * jnp.where(is_followed, at(value, after), 0.0) - value
    # A linear recurrence from right to left: A_t = factor_t A_(t+1) + term_t.
    goes_on = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (0, 1)))
    factor = jnp.where(actions.ends, discount * gae_lambda, 1.0) * goes_on
    term = jnp.where(actions.ends, delta, 0.0)

    def both(right: tuple[Array, Array], left: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] * right[0], left[0] * right[1] + left[1]

    return jax.lax.associative_scan(both, (factor, term), reverse=True, axis=1)[1]


@jaxtyped(typechecker=beartype)
def value_loss(
    values: Float[Array, "*shape"],
    old_values: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    *,
    value_clip: float | None,
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """Returns (V - G)^2 / 2 of each state, and where the clip took its gradient (PPO2).

    With a `value_clip` c the loss is max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2. V are the values that
    are trained, V_old those before the update, and G the targets: advantages + V_old.
    """
    free = jnp.square(values - returns)
    if value_clip is None:
        return free / 2, jnp.zeros(values.shape, jnp.bool_)
    bounded = jnp.square(jnp.clip(values, old_values - value_clip, old_values + value_clip) - returns)
    return jnp.maximum(free, bounded) / 2, bounded > free
