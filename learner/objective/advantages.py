"""Group and per-turn advantages, and the rewards of tokens of which a critic makes advantages."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from beartype import beartype
from jaxtyping import (
    Bool,  # pyright: ignore[reportUnknownVariableType]
    Float32,  # pyright: ignore[reportUnknownVariableType]
    Float64,  # pyright: ignore[reportUnknownVariableType]
    Int,  # pyright: ignore[reportUnknownVariableType]
    jaxtyped,  # pyright: ignore[reportUnknownVariableType]
)

from bridge.rollout_types import Rollout
from configs import custom_functions
from configs.sections import LossConfig

AdvantageFn = Callable[[Float64[np.ndarray, " K"], LossConfig], Float64[np.ndarray, " K"]]


_ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""Relative difference up to which two rewards count as equal; allows for float32 rounding in verifiers."""
_CANCELLED = 1e-13
"""Difference of rewards whose weighted parts cancel, as 0.1 + 0.2 - 0.3 and 0."""


OWN_ADVANTAGE = custom_functions.Signature(
    takes=("rewards", "config"), constants=("num_tokens", "turn_rewards", "rollouts"), returns="advantages"
)
"""Signature of a custom advantage: an `AdvantageFn` that may also take fields of `Responses` by name, and may return K
arrays with an advantage per turn or per token."""


class Responses(NamedTuple):
    """Data of a group's K responses that a custom advantage may take in addition to their rewards."""

    rollouts: Sequence[Rollout]
    """Responses as sampled: tokens, loss mask, logprobs, versions, scores by verifier, turn rewards."""

    @property
    def num_tokens(self) -> Int[np.ndarray, " K"]:
        """Tokens that the policy sampled."""
        return np.array([np.count_nonzero(r.loss_mask) for r in self.rollouts])

    @property
    def turn_rewards(self) -> list[Float32[np.ndarray, " N"]]:
        """Environment rewards of each response, one per turn; empty without turn rewards."""
        return [r.turn_rewards for r in self.rollouts]


def grpo(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float64[np.ndarray, " K"]:
    """Returns A_i = (R_i - mean R) / (std R + eps) (RolloutPipe, eq. 1).

    std^2 = sum_i (R_i - mean R)^2 / (K - 1), or / K with `advantage_std=population`; the equation does not specify
    which. With K = 2 the first makes every |A| 1 / sqrt(2), the second 1.
    """
    std = rewards.std(ddof=1 if config.advantage_std == "sample" else 0)
    return (rewards - rewards.mean()) / (std + config.advantage_eps)


def mean_baseline(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float64[np.ndarray, " K"]:
    """Returns A_i = R_i - mean R (Dr.GRPO; PipelineRL NeurIPS, eq. 4)."""
    del config
    return rewards - rewards.mean()


def rloo(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float64[np.ndarray, " K"]:
    """Returns A_i = R_i - mean of the other K - 1 rewards = K / (K - 1) (R_i - mean R) (RLOO, Ahmadian et al. 2024)."""
    del config
    # Differences from the mean keep the digits of a small spread, which sums of rewards would lose.
    return (rewards - rewards.mean()) * (rewards.size / (rewards.size - 1))


def no_advantage(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float64[np.ndarray, " K"]:
    """Returns A_i = 0: the rewards do not train, and on-policy distillation alone does (`distillation.distilled`)."""
    del config
    return np.zeros_like(rewards)


ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": mean_baseline,
    "rloo": rloo,
    "mean_baseline": mean_baseline,
    "turn_grpo": grpo,
    "none": no_advantage,
}
"""Advantage functions by `LossConfig.advantage`; `turn_grpo` is `grpo` over the returns of a group's turns."""


def has_signal(rewards: Float64[np.ndarray, " K"]) -> bool:
    """Returns False for a zero-variance group: all K rewards, or all returns of its turns, are equal.

    Rewards are sums of weighted parts, so rewards that differ only by rounding (0.1 + 0.2 and 0.3) count as equal.
    """
    return bool(np.ptp(rewards) > max(_ROUNDING * np.max(np.abs(rewards)), _CANCELLED))


@jaxtyped(typechecker=beartype)
def group_advantages(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float32[np.ndarray, " K"]:
    """Returns the advantages of a group's K responses, or of all their turns; exactly 0 for a zero-variance group.

    Raises ValueError if a reward is not finite. `token_advantages` calls custom functions.
    """
    _check_finite(rewards)
    if not has_signal(rewards):
        # R - mean R may differ from 0 by a rounding error, which division by eps would magnify.
        return np.zeros(rewards.shape, np.float32)
    return ADVANTAGES[config.advantage](rewards, config).astype(np.float32)


@functools.cache  # called for every group
def _load(name: str) -> Callable[..., Any]:
    return custom_functions.load("loss.advantage", name, OWN_ADVANTAGE)


def _own(
    rollouts: Sequence[Rollout], rewards: Float64[np.ndarray, " K"], config: LossConfig
) -> list[Float32[np.ndarray, " T"]]:
    """Returns the advantages of each response's tokens by a custom function."""
    function, responses = _load(config.advantage), Responses(rollouts)
    wanted = (
        f"loss.advantage={config.advantage} must return K={len(rollouts)} finite floats as a numpy array, or a list of "
        "K arrays with a float per turn or per token of each response"
    )
    taken = custom_functions.constant_defaults(function, OWN_ADVANTAGE)
    # Copied, so that a function that modifies its arguments cannot change what is trained.
    known = {name: copy.deepcopy(getattr(responses, name)) for name in taken}
    returned: object = function(rewards.copy(), config, **known)
    is_list = isinstance(returned, list | tuple) or np.ndim(cast(Any, returned)) == 1
    each = list(cast("Sequence[Any]", returned)) if is_list else []
    if len(each) != len(rollouts):
        raise ValueError(f"{wanted}, got {f'{len(each)} values' if each else _described(cast(object, returned))}")
    return [_spread(np.asarray(values), rollout, wanted) for rollout, values in zip(rollouts, each, strict=True)]


def _spread(values: np.ndarray[Any, np.dtype[Any]], rollout: Rollout, wanted: str) -> Float32[np.ndarray, " T"]:
    """Returns the advantage of each token from that of the response, of its turns or of its tokens."""
    num_tokens, num_turns = rollout.tokens.size, max(1, rollout.turn_rewards.size)
    if values.dtype.kind != "f" or values.shape not in ((), (num_turns,), (num_tokens,)):
        raise ValueError(
            f"{wanted}, got {_described(values)} for a response of {num_turns} turns and {num_tokens} tokens"
        )
    advantages = values.astype(np.float32)
    if not np.all(np.isfinite(advantages)):
        raise ValueError(f"{wanted}, got {values.tolist()}")
    if advantages.shape == (num_tokens,):
        return advantages
    return np.broadcast_to(advantages, (num_turns,))[turn_of_tokens(rollout.loss_mask, num_turns)]


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return f"{array.dtype}{list(array.shape)}"
    return type(value).__name__


def _check_finite(rewards: Float64[np.ndarray, " K"]) -> None:
    if not np.all(np.isfinite(rewards)):
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")


@jaxtyped(typechecker=beartype)
def turn_returns(
    turn_rewards: Float32[np.ndarray, " N"], end_reward: float, *, discount: float
) -> Float64[np.ndarray, " N"]:
    """Returns G_n = sum_{m >= n} gamma^(m - n) r_m + gamma^(N - 1 - n) R_end, for the turns n = 0 .. N - 1.

    r are the `turn_rewards` from the environment, R_end is the rest of the response's reward, and gamma is `discount`.
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
    """Returns the returns of each response, one per turn; a response without turn rewards has its reward alone.

    `rewards` are the total rewards of the responses, turn rewards included, shaped or not.
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
    """Returns the values whose differences are a learning signal: K rewards, or all turn returns.

    The latter for `turn_grpo`, and for a custom advantage that takes `turn_rewards` or `rollouts`.
    """
    if not _reads_turns(config):
        return rewards
    return np.concatenate(group_returns(rollouts, rewards, config))


def _reads_turns(config: LossConfig) -> bool:
    if not custom_functions.is_custom(config.advantage):
        return config.advantage == "turn_grpo"
    taken = custom_functions.constant_defaults(_load(config.advantage), OWN_ADVANTAGE)
    return not taken.keys().isdisjoint(("turn_rewards", "rollouts"))


def token_advantages(
    rollouts: Sequence[Rollout], rewards: Float64[np.ndarray, " K"], config: LossConfig
) -> list[Float32[np.ndarray, " T"]]:
    """Returns the advantage of each token of a group's responses; values at observed tokens are not used.

    With `advantage=gae` it returns the `token_rewards`, from which the critic computes advantages on the devices.

    All tokens of a response have the advantage of its shaped reward. With `advantage=turn_grpo`, tokens of turn n of
    response i have A_{i,n} = (G_{i,n} - mean G) / (std G + eps), with mean and std over all turns of all K responses.
    If each response has one turn, this equals grpo bit for bit. A custom advantage may be per response, per turn or per
    token.

    Raises ValueError if a reward is not finite, or a custom function cannot be loaded or does not return finite floats.
    """
    if config.uses_critic:
        return [token_rewards(rollout, reward) for rollout, reward in zip(rollouts, rewards.tolist(), strict=True)]
    values = credited(rollouts, rewards, config)
    if custom_functions.is_custom(config.advantage):
        _check_finite(values)
        if not has_signal(values):
            return [np.zeros(r.tokens.size, np.float32) for r in rollouts]
        return _own(rollouts, rewards, config)
    advantages = group_advantages(values, config)
    if config.advantage != "turn_grpo":
        return [np.full(r.tokens.size, a, np.float32) for r, a in zip(rollouts, advantages, strict=True)]
    sizes = [max(1, r.turn_rewards.size) for r in rollouts]
    of_turns = np.split(advantages, np.cumsum(sizes)[:-1])
    return [a[turn_of_tokens(r.loss_mask, a.size)] for r, a in zip(rollouts, of_turns, strict=True)]


def token_rewards(rollout: Rollout, reward: float) -> Float32[np.ndarray, " T"]:
    """Returns the reward of each token: a turn's at its last sampled token, and the rest at the response's last one.

    `reward` is the response's total shaped reward, turn rewards included.
    """
    turns = rollout.turn_rewards.astype(np.float64)
    rewards = np.zeros(rollout.tokens.size)
    ends = np.flatnonzero(np.diff(rollout.loss_mask.astype(np.int8), append=0) == -1)
    if turns.size:
        rewards[ends] = turns
    rewards[ends[-1]] += reward - turns.sum()
    return rewards.astype(np.float32)


@jaxtyped(typechecker=beartype)
def turn_of_tokens(sampled: Bool[np.ndarray, " T"], num_turns: int) -> Int[np.ndarray, " T"]:
    """Returns the turn of each token, from 0; an observed token belongs to the turn before it, or to the first.

    With `num_turns` 1 it is 0 everywhere, even if sampled tokens are in several runs.
    """
    if num_turns == 1:
        return np.zeros(sampled.shape, np.int64)
    starts = np.diff(sampled.astype(np.int8), prepend=0) == 1
    return np.maximum(np.cumsum(starts) - 1, 0)
