"""What the presets that publish at the round's end share; R, K and U are RolloutPipe's (section 5.1)."""

from typing import Literal

from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, PublishConfig, RoundsConfig
from configs.sizes import sections


def round_end(
    preset: str,
    size: str,
    *,
    train_start: Literal["round_complete", "group_ready"],
    admission: Literal["fifo", "frontier"],
) -> Config:
    """R = 96, K = 8, U = 2 at paper size: 48 updates a round."""
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
        **sections(size, preset),
    )
