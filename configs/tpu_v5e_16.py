"""16 chips of v5e (topology v5e:4x4, 15.75 GiB each): Qwen3-1.7B in rows of 16k tokens, one a chip.

Weights and rows are split over all chips (fsdp); the residual stream of 28 layers is what fills the memory.
"""

from configs.schema import Config
from configs.sections import MeshConfig, PackingConfig
from configs.tpu_slices import pick, slice_config


def get_config(model: str = "") -> Config:
    """`configs/tpu_v5e_16.py`, or `configs/tpu_v5e_16.py:Qwen3-1.7B`."""
    preset = "tpu_v5e_16"
    small = slice_config(
        preset, mesh=MeshConfig(fsdp=16), packing=PackingConfig(rows=16, row_tokens=16384), max_tokens=16384
    )
    return pick(preset, model, {"Qwen3-1.7B": small})
