"""Reward shaping, trainable-token mask and learning signal of a group.

Each shaping part is a separate function and is logged separately (`learner/metrics/step_metrics.py`). Reward metrics
are of the unshaped rewards. Lengths count sampled tokens, because the policy does not control observation lengths.
"""

import numpy as np
from beartype import beartype
from jaxtyping import (
    Bool,
    Float64,  # pyright: ignore[reportUnknownVariableType]
    Int,  # pyright: ignore[reportUnknownVariableType]
    jaxtyped,  # pyright: ignore[reportUnknownVariableType]
)

from bridge.rollout_types import Group, Rollout
from configs.sections import LossConfig
from learner.objective.advantages import credited, has_signal


@jaxtyped(typechecker=beartype)
def overlong_penalty(
    lengths: Int[np.ndarray, " K"], *, buffer_tokens: int, penalty: float, max_response_tokens: int
) -> Float64[np.ndarray, " K"]:
    """Returns DAPO's soft overlong punishment times p (eq. 13): p clip((L_max - L_buffer - n_i) / L_buffer, -1, 0).

    It is 0 up to L_max - L_buffer tokens, then falls linearly to -p at L_max = max_response_tokens and beyond.
    """
    excess = (max_response_tokens - buffer_tokens - lengths.astype(np.float64)) / buffer_tokens
    return penalty * np.clip(excess, -1.0, 0.0)


@jaxtyped(typechecker=beartype)
def length_penalty(
    rewards: Float64[np.ndarray, " K"], lengths: Int[np.ndarray, " K"], *, weight: float
) -> Float64[np.ndarray, " K"]:
    """Returns Kimi k1.5's length reward times a weight (arXiv 2501.12599, section 2.3.3).

    lambda_i = 0.5 - (n_i - min n) / (max n - min n). A correct response (R_i > 0) receives lambda_i, a wrong one min(0,
    lambda_i), so that only correct responses gain from being short. If all lengths are equal it is 0.
    """
    shortest, longest = lengths.min(), lengths.max()
    if shortest == longest:
        return np.zeros(lengths.shape)
    share = 0.5 - (lengths - shortest) / (longest - shortest)
    return weight * np.where(rewards > 0, share, np.minimum(0.0, share))


@jaxtyped(typechecker=beartype)
def shaping_parts(
    rewards: Float64[np.ndarray, " K"],
    lengths: Int[np.ndarray, " K"],
    config: LossConfig,
    max_response_tokens: int,
) -> dict[str, Float64[np.ndarray, " K"]]:
    """Returns the amount that each enabled part adds to the rewards of a group, by name.

    `rewards` are unshaped, and `lengths` are the sampled tokens of each response. A weight of 0 disables a part. Raises
    ValueError if the overlong buffer is not below `max_response_tokens`.
    """
    parts: dict[str, Float64[np.ndarray, " K"]] = {}
    if config.overlong_tokens:
        check_overlong_buffer(config, max_response_tokens)
        parts["overlong_penalty"] = overlong_penalty(
            lengths,
            buffer_tokens=config.overlong_tokens,
            penalty=config.overlong_penalty,
            max_response_tokens=max_response_tokens,
        )
    if config.length_penalty:
        parts["length_penalty"] = length_penalty(rewards, lengths, weight=config.length_penalty)
    return parts


@jaxtyped(typechecker=beartype)
def shaped_rewards(
    rewards: Float64[np.ndarray, " K"],
    lengths: Int[np.ndarray, " K"],
    config: LossConfig,
    max_response_tokens: int,
) -> Float64[np.ndarray, " K"]:
    """Returns rewards plus all `shaping_parts`; raises ValueError as they do, or if a reward is not finite."""
    if not np.all(np.isfinite(rewards)):
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    shaped = rewards
    for part in shaping_parts(rewards, lengths, config, max_response_tokens).values():
        shaped = shaped + part
    return shaped


def check_overlong_buffer(config: LossConfig, max_response_tokens: int) -> None:
    """Raises ValueError if the overlong buffer is not below `max_response_tokens`."""
    if config.overlong_tokens >= max_response_tokens:
        raise ValueError(
            f"loss.overlong_buffer_tokens ({config.overlong_tokens}) must be below sampling.max_response_tokens "
            f"({max_response_tokens}), or every response is punished"
        )


def num_sampled(rollout: Rollout) -> int:
    """Returns the number of tokens that the policy sampled; an environment produced the others."""
    return int(np.count_nonzero(rollout.loss_mask))


def trained_tokens(rollout: Rollout, *, masks_truncated: bool) -> Bool[np.ndarray, " T"]:
    """Returns a mask that is True at trained tokens, which are those that the policy sampled.

    With `masks_truncated` (prompts.truncated_responses=mask) it is False everywhere for a truncated response (DAPO,
    section 3.4, overlong filtering).
    """
    if masks_truncated and rollout.finish == "length":
        return np.zeros_like(rollout.loss_mask)
    return rollout.loss_mask


def has_learning_signal(group: Group, loss: LossConfig, *, masks_truncated: bool, has_teacher: bool = False) -> bool:
    """Returns True if any token of a group trains, and its rewards (or turn returns) differ or it has a teacher.

    With a critic (`advantage=gae`) it is True if any of its tokens train, whatever the rewards are.

    DAPO's dynamic sampling keeps groups with 0 < number correct < K (eq. 11). For rewards 0 and 1 that means that not
    all are equal, which generalizes to other rewards. The test uses unshaped rewards, because an overlong penalty makes
    even K correct responses differ. With `advantage=turn_grpo`, equal total rewards with different turn returns have a
    signal.
    """
    rewards = np.array([r.reward for r in group.rollouts], np.float64)
    differs = loss.uses_critic or has_teacher or has_signal(credited(group.rollouts, rewards, loss))
    return differs and any(trained_tokens(r, masks_truncated=masks_truncated).any() for r in group.rollouts)
