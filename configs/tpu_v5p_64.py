"""64 chips of v5p (topology v5p:4x4x4, 95.74 GiB each): Qwen2.5-7B in rows of 32k tokens, one a chip.

Google's name of this slice is v5p-128, by its TensorCores.
"""

from configs.schema import Config
from configs.sections import MeshConfig, PackingConfig
from configs.tpu_slices import pick, slice_config


def get_config(model: str = "") -> Config:
    """`configs/tpu_v5p_64.py`, or `configs/tpu_v5p_64.py:Qwen2.5-7B`."""
    preset = "tpu_v5p_64"
    medium = slice_config(
        preset, mesh=MeshConfig(fsdp=64), packing=PackingConfig(rows=64, row_tokens=32768), max_tokens=32768
    )
    return pick(preset, model, {"Qwen2.5-7B": medium})
