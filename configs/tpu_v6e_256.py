"""256 chips of v6e (topology v6e:16x16, 31.25 GiB each): Qwen2.5-32B in rows of 8k tokens, one a chip."""

from configs.schema import Config
from configs.sections import MeshConfig, PackingConfig
from configs.tpu_slices import pick, slice_config


def get_config(model: str = "") -> Config:
    """`configs/tpu_v6e_256.py`, or `configs/tpu_v6e_256.py:Qwen2.5-32B`."""
    preset = "tpu_v6e_256"
    dense = slice_config(
        preset, mesh=MeshConfig(fsdp=256), packing=PackingConfig(rows=256, row_tokens=8192), max_tokens=8192
    )
    return pick(preset, model, {"Qwen2.5-32B": dense})
