"""What of a group trains: which of its tokens, and whether it teaches anything."""

import numpy as np
from jaxtyping import Bool

from bridge.types import Group, Rollout
from configs.sections import LossConfig
from learner.objective.advantages import has_signal
from learner.objective.turns import credited


def num_sampled(rollout: Rollout) -> int:
    """Tokens of a response that the policy sampled; the others are an environment's."""
    return int(np.count_nonzero(rollout.loss_mask))


def trained_tokens(rollout: Rollout, *, masks_truncated: bool) -> Bool[np.ndarray, " T"]:
    """True at the tokens of a response that train: those the policy sampled.

    With `masks_truncated` (prompts.truncated=mask) it is none where the token limit cut the response off (DAPO, section
    3.4, overlong filtering).
    """
    if masks_truncated and rollout.finish == "length":
        return np.zeros_like(rollout.loss_mask)
    return rollout.loss_mask


def teaches(group: Group, loss: LossConfig, *, masks_truncated: bool) -> bool:
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
