"""Tail batching with streamed gradients: short rounds race, their losers make long rounds (RollPacker sections 3, 4.4).

P0 = 128 prompts of R0 = 8 responses, eta = 1.25 for both (section 6), one update a round (U = R): gradients are
accumulated while the round still runs and applied at its end. Elastic engines follow preemptions (section 4.2).

A race is one only if all of it runs at once: 160 prompts of 10 responses want seven engines of 256 sequences, or
prompts lose that never began.
"""

import dataclasses

from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, PublishConfig, RoundsConfig
from configs.sizes import sections

ELASTIC = {"elastic": True, "max_tensor_parallel_size": 8}
"""Up to the devices of one server (section 4.2)."""


def get_config(size: str = "paper") -> Config:
    """`configs/rollpacker.py`, or `configs/rollpacker.py:tiny`."""
    tiny = size == "tiny"
    config = Config(
        preset="rollpacker",
        rounds=RoundsConfig(
            groups_per_round=16 if tiny else 128,
            samples_per_group=8,
            groups_per_update=16 if tiny else 128,
            overprovision_prompts=1.25,
            overprovision_samples=1.25,
        ),
        admission=AdmissionConfig(policy="fifo"),
        publish=PublishConfig(when="round_end"),
        loss=LossConfig(name="grpo_clip", advantage="grpo", normalization="sequence"),
        **sections(size, "rollpacker"),
    )
    return config if tiny else dataclasses.replace(config, actor=dataclasses.replace(config.actor, **ELASTIC))
