"""Check of custom loss and advantage functions before a run: `python -m learner.objective.check_custom`.

Reads {"loss": LossConfig, "group_size": K} as JSON from stdin. Exits with code 0, or with 1 and the error as the last
line of stderr.
"""

# pyright: reportUnknownMemberType=false
# The type hints of jax are partly unknown.

import json
import sys
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float

from bridge.rollout_types import Rollout
from configs import custom_functions
from configs.sections import LossConfig
from learner.objective.advantages import token_advantages
from learner.objective.losses import TokenInputs, needs, token_loss

_OfTokens = Callable[[Array, TokenInputs], Array]
_LOG_RATIOS = (0.0, 0.0, -0.3, 0.3, 3.0, -3.0, 0.0, 0.0)
"""log pi - log mu of the test tokens: on-policy, slightly off-policy and far off-policy."""
_ADVANTAGES = (3.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 1.0)
"""Advantages whose mean differs between the halves, so that a loss that averages over its tokens is detected."""


def check(config: LossConfig, *, group_size: int) -> None:
    """Calls the custom loss and advantage as a run does; built-in functions are not checked.

    Raises ValueError with a message of one line if a function cannot be loaded, fails, returns a wrong shape, a wrong
    type or a non-finite value, or if its loss of a token depends on other tokens.
    """
    if custom_functions.is_custom(config.advantage):
        try:
            num = max(2, group_size)
            rollouts = [_rollout(i, i / (num - 1)) for i in range(num)]
            token_advantages(rollouts, np.array([r.reward for r in rollouts]), config)
        except Exception as e:
            raise _of(f"loss.advantage={config.advantage} fails on a group of rewards from 0 to 1", e) from e
    if custom_functions.is_custom(config.name):
        try:
            _check_loss(config)
        except Exception as e:
            raise _of(f"loss.name={config.name} fails on a sample of tokens", e) from e


def _rollout(index: int, reward: float) -> Rollout:
    """Returns a made-up response of one turn, or of two with an observation between them."""
    num_turns = 1 + index % 2
    mask = np.array(([True] * (1 + index // 2) + [False]) * num_turns)[:-1]
    return Rollout(
        tokens=np.arange(mask.size, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        token_versions=np.zeros(mask.size, np.int32),
        finish="stop",
        reward=reward,
        turn_rewards=np.array([0.0] * (num_turns - 1) + [reward], np.float32),
    )


def _of(what: str, error: Exception) -> ValueError:
    """Returns the error, prefixed with `what` unless it already names the function."""
    if isinstance(error, ValueError) and str(error).startswith("loss."):
        return error
    return ValueError(f"{what}: {custom_functions.first_line(error)}")


def _check_loss(config: LossConfig) -> None:
    wanted = needs(config)
    logprobs = jnp.linspace(-5.0, -0.1, len(_LOG_RATIOS), dtype=jnp.float32)
    inputs = TokenInputs(
        behavior_logprobs=logprobs - jnp.array(_LOG_RATIOS, jnp.float32),
        advantages=jnp.array(_ADVANTAGES, jnp.float32),
        loss_mask=jnp.ones(logprobs.shape, jnp.bool_),
        reference_logprobs=logprobs - 0.1 if wanted.reference else None,
        teacher_logprobs=logprobs - 0.1 if wanted.teacher else None,
        has_teacher=jnp.ones(logprobs.shape, jnp.bool_) if wanted.has_teacher else None,
        proximal_logprobs=logprobs - 0.2 if wanted.proximal else None,
        sequence_log_ratio=jnp.full(logprobs.shape, 0.1) if wanted.sequence_ratio else None,
        turn_log_ratio=jnp.full(logprobs.shape, 0.1) if wanted.turn_ratio else None,
    )

    def losses(logprobs: Float[Array, " T"], inputs: TokenInputs) -> Float[Array, " T"]:
        divergence = jnp.ones(logprobs.shape) if wanted.divergence else None
        return token_loss(logprobs, jnp.ones(logprobs.shape), inputs, config, divergence).loss

    def total(logprobs: Float[Array, " T"], inputs: TokenInputs) -> Float[Array, ""]:
        return jnp.sum(losses(logprobs, inputs))

    slope = cast(_OfTokens, jax.grad(total))
    whole, slopes = _numbers(losses, logprobs, inputs), _numbers(slope, logprobs, inputs)
    if not (np.all(np.isfinite(whole)) and np.all(np.isfinite(slopes))):
        raise ValueError(
            f"loss.name={config.name} must be finite, and its gradient too, at log pi - log mu = {list(_LOG_RATIOS)} "
            f"with advantages {list(_ADVANTAGES)}; got {whole}, gradient {slopes}"
        )
    half = logprobs.size // 2

    def first(x: Array) -> Array:
        return x[:half]

    def second(x: Array) -> Array:
        return x[half:]

    parts = np.concatenate([_numbers(losses, take(logprobs), jax.tree.map(take, inputs)) for take in (first, second)])
    if not np.allclose(whole, parts, rtol=1e-5, atol=1e-6):
        raise ValueError(
            f"loss.name={config.name} must be elementwise, for it is taken over any chunk of tokens; the loss of "
            f"{logprobs.size} tokens is {whole}, that of their halves {parts}"
        )


def _numbers(function: _OfTokens, logprobs: Array, inputs: TokenInputs) -> Float[np.ndarray, " T"]:
    """Returns the values of the compiled function; compiling makes a Python `if` on a value fail, as in a run."""
    compiled = cast(_OfTokens, jax.jit(function))
    return np.asarray(compiled(logprobs, inputs))


def main() -> None:
    """Checks the functions of the config on standard input."""
    given = json.load(sys.stdin)
    try:
        check(msgspec.convert(given["loss"], LossConfig), group_size=given["group_size"])
    except ValueError as e:
        sys.exit(f"error: {' '.join(str(e).split())}")


if __name__ == "__main__":
    main()
