"""In-flight weight updates after every step, running requests and their KV cache kept (PipelineRL section 4).

At paper size: batch 1024, truncated importance sampling with c = 5, learning rate 1e-6 (section 5). The
window of 192 groups of 16 is the paper's 48 generation GPUs at H = 64.
"""

from configs.schema import Config
from configs.sections import AdmissionConfig, LossConfig, PublishConfig, RoundsConfig
from configs.sizes import sections


def get_config(size: str = "paper") -> Config:
    """`configs/pipelinerl.py`, or `configs/pipelinerl.py:tiny`."""
    tiny = size == "tiny"
    return Config(
        preset="pipelinerl",
        rounds=RoundsConfig(
            groups_per_round=32 if tiny else 256,
            samples_per_group=8 if tiny else 16,
            groups_per_update=16 if tiny else 64,
        ),
        admission=AdmissionConfig(policy="window", width=32 if tiny else 192),
        publish=PublishConfig(when="every", every_n_steps=1, kv_cache="keep"),
        loss=LossConfig(name="truncated_is", advantage="mean_baseline", max_weight=5.0, normalization="token"),
        **sections(size, "pipelinerl"),
    )
