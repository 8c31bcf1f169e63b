"""Losses and advantages by name: default constants, normalization, and the policies that they use."""

from typing import Literal

from configs import custom_functions

LOSS_CONSTANTS: dict[str, dict[str, float | None]] = {
    "reinforce": {},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "grpo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "truncated_is": {"max_weight": 5.0},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "max_weight": 5.0},
    "tis": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "max_weight": 2.0},
    "masked_is": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "min_weight": 0.5, "max_weight": 2.0},
    "cispo": {"clip_low": 0.1, "clip_high": 0.1},
    "topr": {"min_weight": 0.0, "max_weight": 1.0},
    "sft": {},
}
"""Default constants per loss, as published systems ship them (None: off). CISPO uses the values of ROLL Flash;
MiniMax-M1 sets clip_low=1 (no lower bound) and tunes clip_high."""

Normalization = Literal["token", "sequence", "sequence_sum", "constant"]

SUPERVISED = "sft"
"""Loss of supervised fine-tuning. It reads no rewards, and the run has no actors."""

PROXIMAL_LOSSES = ("ppo_clip", "decoupled_ppo", "tis", "masked_is")
"""Losses that use a proximal policy pi_prox distinct from the sampling policy mu."""
UNCORRECTED_LOSSES = ("reinforce", "ppo_clip")
"""Losses without a ratio to mu, which `CorrectionConfig.weight` may therefore multiply."""

NORMALIZATIONS: dict[str, Normalization] = {"gspo": "sequence", "dr_grpo": "constant"}
"""Default normalization per loss, where it is not `token`."""
DECOUPLED_LOSSES = ("decoupled_ppo", "tis")
"""Proximal losses that equal truncated_is bit for bit if pi_prox is the policy at every gradient."""

Proximal = Literal["batch", "round", "published"]

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "mean_baseline", "turn_grpo", "gae", "none")
STANDARDIZED = ("grpo", "turn_grpo")
"""Advantages that divide by a standard deviation."""

CUSTOM_LOSS = custom_functions.Signature(
    takes=("logprobs", "inputs"),
    constants=("clip_low", "clip_high", "dual_clip", "min_weight", "max_weight"),
    returns="(loss, clipped)",
)
"""Signature of a custom loss: as in learner/objective/losses.py, with any of the constants of `LossConfig`."""
OPTIONAL_INPUTS = ("proximal_logprobs", "sequence_log_ratio", "turn_log_ratio")
"""Loss inputs computed on request. A custom loss lists them in its attribute `needs`."""
