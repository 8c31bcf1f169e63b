"""128 chips of v5p (topology v5p:4x4x8, 95.74 GiB each): Qwen2.5-32B, or the mixture of experts Qwen3-30B-A3B.

Rows of 16k tokens, one a chip, weights split over all chips. The mixture too: with this many tokens a chip, gathering
all experts of a layer costs no more than sending the tokens to their experts, and no router can unbalance it.
Google's name of this slice is v5p-256, by its TensorCores.
"""

from configs.schema import Config
from configs.sections import MeshConfig, PackingConfig
from configs.tpu_slices import pick, slice_config


def get_config(model: str = "") -> Config:
    """`configs/tpu_v5p_128.py`, or `configs/tpu_v5p_128.py:Qwen3-30B-A3B`."""
    preset = "tpu_v5p_128"
    config = slice_config(
        preset, mesh=MeshConfig(fsdp=128), packing=PackingConfig(rows=128, row_tokens=16384), max_tokens=16384
    )
    return pick(preset, model, {"Qwen2.5-32B": config, "Qwen3-30B-A3B": config})
