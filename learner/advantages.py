"""Advantages from the rewards of one complete group; numpy in float64, float32 out."""

from collections.abc import Callable

import numpy as np
from beartype import beartype
from jaxtyping import Float32, Float64, jaxtyped

from configs.schema import LossConfig

AdvantageFn = Callable[[Float64[np.ndarray, " K"], LossConfig], Float64[np.ndarray, " K"]]


def grpo(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float64[np.ndarray, " K"]:
    """A_i = (R_i - mean R) / (std R + eps) with the population's std (RolloutPipe, eq. 1)."""
    return (rewards - rewards.mean()) / (rewards.std() + config.advantage_eps)


def mean_baseline(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float64[np.ndarray, " K"]:
    """A_i = R_i - mean R (Dr.GRPO; PipelineRL NeurIPS, eq. 4)."""
    del config
    return rewards - rewards.mean()


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo, "mean_baseline": mean_baseline}
"""By `LossConfig.advantage`."""


def has_signal(rewards: Float64[np.ndarray, " K"]) -> bool:
    """False for a zero-variance group: all K rewards are the same."""
    return bool(np.any(rewards != rewards[0]))


@jaxtyped(typechecker=beartype)
def group_advantages(rewards: Float64[np.ndarray, " K"], config: LossConfig) -> Float32[np.ndarray, " K"]:
    """The advantages of a group's K responses; exactly zero for a zero-variance group.

    Raises:
      ValueError: a reward is not finite.
    """
    if not np.all(np.isfinite(rewards)):
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    if not has_signal(rewards):
        # R - mean R may be one rounding error away from 0, which eps would then magnify.
        return np.zeros(rewards.shape, np.float32)
    return ADVANTAGES[config.advantage](rewards, config).astype(np.float32)
