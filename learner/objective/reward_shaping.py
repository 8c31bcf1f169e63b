"""Reward shaping, trainable-token mask, group signal, mean scores.

Each part is a function of its own and is logged apart (`learner/metrics/step_metrics.py`); the reward metrics are of
the rewards as judged. Lengths are in sampled tokens: what an environment said is not the policy's to shorten.
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
    """DAPO's soft overlong punishment, times p (DAPO, eq. 13): p clip((L_max - L_buffer - n_i) / L_buffer, -1, 0).

    Nothing up to L_max - L_buffer tokens, then linearly down to -p at L_max = max_response_tokens and beyond.
    """
    excess = (max_response_tokens - buffer_tokens - lengths.astype(np.float64)) / buffer_tokens
    return penalty * np.clip(excess, -1.0, 0.0)


@jaxtyped(typechecker=beartype)
def length_penalty(
    rewards: Float64[np.ndarray, " K"], lengths: Int[np.ndarray, " K"], *, weight: float
) -> Float64[np.ndarray, " K"]:
    """Kimi k1.5's length reward, times a weight (arXiv 2501.12599, section 2.3.3).

    lambda_i = 0.5 - (n_i - min n) / (max n - min n); a right response (R_i > 0) gets lambda_i, a wrong one
    min(0, lambda_i): being short earns something only where it is right. 0 where all are of one length.
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
    """What each part that is on adds to the rewards of one group, by its name in `LossConfig`.

    Args:
      rewards: as judged.
      lengths: n, sampled tokens of each response.
      config: which parts are on, and how much they count.
      max_response_tokens: L_max.

    Raises:
      ValueError: the overlong buffer is as long as a response may be.
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
    """A group's rewards and all that `shaping_parts` adds to them; the rewards themselves where nothing is on.

    Raises:
      ValueError: a reward is not finite, or the overlong buffer is as long as a response may be.
    """
    if not np.all(np.isfinite(rewards)):
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    shaped = rewards
    for part in shaping_parts(rewards, lengths, config, max_response_tokens).values():
        shaped = shaped + part
    return shaped


def check_overlong_buffer(config: LossConfig, max_response_tokens: int) -> None:
    """Refuses an overlong buffer that leaves no length unpunished.

    Raises:
      ValueError: it is not below max_response_tokens.
    """
    if config.overlong_tokens >= max_response_tokens:
        raise ValueError(
            f"loss.overlong_buffer_tokens ({config.overlong_tokens}) must be below sampling.max_response_tokens "
            f"({max_response_tokens}), or every response is punished"
        )


def num_sampled(rollout: Rollout) -> int:
    """Tokens of a response that the policy sampled; the others are an environment's."""
    return int(np.count_nonzero(rollout.loss_mask))


def trained_tokens(rollout: Rollout, *, masks_truncated: bool) -> Bool[np.ndarray, " T"]:
    """True at the tokens of a response that train: those the policy sampled.

    With `masks_truncated` (prompts.truncated_responses=mask) it is none where the token limit cut the response off
    (DAPO, section
    3.4, overlong filtering).
    """
    if masks_truncated and rollout.finish == "length":
        return np.zeros_like(rollout.loss_mask)
    return rollout.loss_mask


def has_learning_signal(group: Group, loss: LossConfig, *, masks_truncated: bool) -> bool:
    """Whether a group's rewards differ, by turns its turns' returns, and any of its responses trains.

    DAPO's dynamic sampling keeps the groups with 0 < number correct < K (eq. 11). With rewards 0 and 1 that is that not
    all are equal, and so it is put for any others. It is asked of the rewards as judged: an overlong penalty makes even
    K right answers differ, and tells nothing about right and wrong. With `advantage=turn_grpo` responses that earned
    the same in all teach if they earned it in other turns.
    """
    rewards = np.array([r.reward for r in group.rollouts], np.float64)
    return has_signal(credited(group.rollouts, rewards, loss)) and any(
        trained_tokens(r, masks_truncated=masks_truncated).any() for r in group.rollouts
    )
