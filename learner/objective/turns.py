"""Advantages of tokens: of a whole response for all its tokens, or of each turn for its own; numpy in float64."""

from collections.abc import Sequence

import numpy as np
from beartype import beartype
from jaxtyping import Bool, Float32, Float64, Int, jaxtyped  # pyright: ignore[reportUnknownVariableType]

from bridge.types import Rollout
from configs.sections import LossConfig
from learner.objective.advantages import Responses, group_advantages


@jaxtyped(typechecker=beartype)
def turn_returns(
    turn_rewards: Float32[np.ndarray, " N"], end_reward: float, *, discount: float
) -> Float64[np.ndarray, " N"]:
    """G_n = sum_{m >= n} gamma^(m - n) r_m + gamma^(N - 1 - n) R_end, for the turns n = 0 .. N - 1.

    Args:
      turn_rewards: r, the environment's.
      end_reward: R_end, what the whole response earned besides.
      discount: gamma.
    """
    rewards = turn_rewards.astype(np.float64)
    rewards[-1] += end_reward
    returns, after = np.empty_like(rewards), 0.0
    for n in reversed(range(rewards.size)):
        returns[n] = after = rewards[n] + discount * after
    return returns


def group_returns(
    rollouts: Sequence[Rollout], rewards: Float64[np.ndarray, " K"], config: LossConfig
) -> list[Float64[np.ndarray, " N"]]:
    """The returns of each response, one a turn; of a response without rewards by turn its reward alone.

    Args:
      rollouts: a group's, which give the rewards by turn.
      rewards: of the whole responses, those by turn included, shaped or not.
      config: gives the discount.
    """
    returns: list[Float64[np.ndarray, " N"]] = []
    for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
        turns = rollout.turn_rewards
        if turns.size == 0:
            returns.append(np.array([reward]))
        else:
            end_reward = reward - float(turns.sum(dtype=np.float64))
            returns.append(turn_returns(turns, end_reward, discount=config.turn_discount))
    return returns


def credited(
    rollouts: Sequence[Rollout], rewards: Float64[np.ndarray, " K"], config: LossConfig
) -> Float64[np.ndarray, " C"]:
    """What a group's advantages are taken of: the K rewards; with `advantage=turn_grpo` the returns of all turns."""
    if config.advantage != "turn_grpo":
        return rewards
    return np.concatenate(group_returns(rollouts, rewards, config))


def token_advantages(
    rollouts: Sequence[Rollout], rewards: Float64[np.ndarray, " K"], config: LossConfig
) -> list[Float32[np.ndarray, " T"]]:
    """The advantage of each token of a group's responses; what an observed token is given is read nowhere.

    All tokens of a response have that of its reward. With `advantage=turn_grpo` those of turn n of response i have
    A_{i,n} = (G_{i,n} - mean G) / (std G + eps), mean and std over all turns of all K responses; where each has one
    turn that is grpo, to the bit.

    Args:
      rollouts: a group's.
      rewards: shaped.
      config: gives the advantage and its constants.

    Raises:
      ValueError: what `group_advantages` does.
    """
    responses = Responses(
        num_tokens=np.array([np.count_nonzero(r.loss_mask) for r in rollouts]),
        turn_rewards=[r.turn_rewards for r in rollouts],
    )
    advantages = group_advantages(credited(rollouts, rewards, config), config, responses)
    if config.advantage != "turn_grpo":
        return [np.full(r.tokens.size, a, np.float32) for r, a in zip(rollouts, advantages, strict=True)]
    sizes = [max(1, r.turn_rewards.size) for r in rollouts]
    of_turns = np.split(advantages, np.cumsum(sizes)[:-1])
    return [a[turn_of_tokens(r.loss_mask, a.size)] for r, a in zip(rollouts, of_turns, strict=True)]


@jaxtyped(typechecker=beartype)
def turn_of_tokens(sampled: Bool[np.ndarray, " T"], num_turns: int) -> Int[np.ndarray, " T"]:
    """The turn that each token is of, from 0; an observed token is counted to the turn before it, or to the first.

    With one turn it is 0 everywhere, however the sampled tokens lie.
    """
    if num_turns == 1:
        return np.zeros(sampled.shape, np.int64)
    starts = np.diff(sampled.astype(np.int8), prepend=0) == 1
    return np.maximum(np.cumsum(starts) - 1, 0)
