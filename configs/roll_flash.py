"""Rollout and training decoupled, bounded by the async ratio (ROLL Flash sections 4.3 and 5.1).

alpha = 2 (its recommendation), every step published, running requests ended and continued under the new weights, and
each sample a ticket of its own (queue scheduling, prompt replication). The loss is decoupled PPO's (section 2.2).
"""

from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, PublishConfig, RoundsConfig
from configs.sizes import sections


def get_config(size: str = "paper") -> Config:
    """`configs/roll_flash.py`, or `configs/roll_flash.py:tiny`."""
    tiny = size == "tiny"
    return Config(
        preset="roll_flash",
        rounds=RoundsConfig(
            groups_per_round=32 if tiny else 256,
            samples_per_group=8 if tiny else 16,
            groups_per_update=16 if tiny else 256,
            max_lag_steps=3,
        ),
        admission=AdmissionConfig(policy="window", async_ratio=2.0, unit="sample"),
        publish=PublishConfig(when="every", every_n_steps=1, at_publish="abort_and_resume"),
        loss=LossConfig(name="decoupled_ppo", advantage="grpo", normalization="sequence"),
        **sections(size, "roll_flash"),
    )
