"""Presets of RolloutPipe: `serial`, `cgp` and `rolloutpipe`; `colocated`, the baseline on shared devices."""

import dataclasses
from typing import Literal

from configs.presets.sizes import PaperSize, sections
from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, OptimizerConfig, PublishConfig, RoundsConfig

PAPER = PaperSize(
    num_updates=192,  # four rounds of R / U = 48, section 5.1
    # All schedules share "the same generation and training hyperparameters" (section 5.1), which the paper does not
    # give. Responses of 3.3k to 3.6k tokens (Figure 5) fit. Other values follow the example scripts of Slime, its base.
    max_tokens=9216,
    max_response_tokens=8192,
    optimizer=OptimizerConfig(learning_rate=1e-6, weight_decay=0.1, beta2=0.98),
)
# Section 5.1 uses exact match. `math` extracts the final answer first, which a model that reasons in text requires;
# `exact` compares the whole response.


def round_end(
    preset: str,
    size: str,
    *,
    train_start: Literal["round_complete", "group_ready"],
    admission: Literal["fifo", "frontier"],
) -> Config:
    """Returns a round schedule. At paper size R = 96, K = 8 and U = 2, so 48 updates per round."""
    tiny = size == "tiny"
    return Config(
        preset=preset,
        rounds=RoundsConfig(
            groups_per_round=32 if tiny else 96,
            samples_per_group=8,
            groups_per_update=16 if tiny else 2,
            train_start=train_start,
        ),
        admission=AdmissionConfig(policy=admission),
        publish=PublishConfig(when="round_end"),
        loss=LossConfig(name="grpo_clip", advantage="grpo", normalization="sequence"),
        **sections(size, preset, PAPER),
    )


def cgp(size: str = "paper") -> Config:
    """Complete-group pipelining: train on each group as it arrives (RolloutPipe section 3.2)."""
    return round_end("cgp", size, train_start="group_ready", admission="fifo")


def rolloutpipe(size: str = "paper") -> Config:
    """Complete-group pipelining with frontier-group dispatch (RolloutPipe section 3.3).

    The paper's width is U. Here it is at least U, and chosen so that the engines keep their speed
    (`learner/schedule/frontier_width.py`).
    """
    return round_end("rolloutpipe", size, train_start="group_ready", admission="frontier")


def serial(size: str = "paper") -> Config:
    """Baseline of the papers: training starts after the whole round is complete (Slime; R/U updates per round)."""
    return round_end("serial", size, train_start="round_complete", admission="fifo")


def colocated(size: str = "paper") -> Config:
    """`serial` on shared devices: all generate, then all train (the baselines of RollPacker section 2.1, veRL)."""
    config = serial(size)
    return dataclasses.replace(config, preset="colocated", actor=dataclasses.replace(config.actor, colocated=True))
