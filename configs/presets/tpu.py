"""Presets of TPU slices: `tpu_v5e_16`, `tpu_v5p_64`, `tpu_v5p_128`, `tpu_v6e_256`."""

import dataclasses
from typing import Literal

from configs.presets import pipelinerl
from configs.schema import Config
from configs.sections import MeshConfig, ModelConfig, PackingConfig, RunConfig, SamplingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceCase:
    """Preset with the slice and the model that it is tuned for."""

    preset: str
    topology: str
    """Topology name in libtpu."""
    model: str
    """Model name in `configs.model_sizes.MODEL_SIZES`."""
    is_recipe: bool = False
    """True if the preset is a file in configs/recipes, for this model only."""

    @property
    def key(self) -> str:
        """Short name of the case."""
        return f"{self.model}@{self.topology}"

    @property
    def config_path(self) -> str:
        """Value of --config."""
        return self.preset if self.is_recipe else f"{self.preset}:{self.model}"


CASES = (
    SliceCase(preset="tpu_v5e_16", topology="v5e:4x4", model="Qwen3-1.7B"),
    SliceCase(preset="tpu_v5p_64", topology="v5p:4x4x4", model="Qwen2.5-7B"),
    SliceCase(preset="tpu_v5p_128", topology="v5p:4x4x8", model="Qwen2.5-32B"),
    SliceCase(preset="tpu_v5p_128", topology="v5p:4x4x8", model="Qwen3-30B-A3B"),
    SliceCase(preset="tpu_v6e_256", topology="v6e:16x16", model="Qwen2.5-32B"),
    SliceCase(preset="gsm8k_qwen2_5_1_5b", topology="v5e:4x4", model="Qwen2.5-1.5B", is_recipe=True),
    SliceCase(preset="countdown_qwen2_5_3b", topology="v5e:4x4", model="Qwen2.5-3B", is_recipe=True),
    SliceCase(preset="deepscaler_qwen3_4b", topology="v5p:2x4x4", model="Qwen3-4B", is_recipe=True),
)
"""Cases of `python -m launch.tools.compile_tpu --all`. The first case of a preset is its default."""


def slice_config(
    preset: str,
    *,
    mesh: MeshConfig,
    packing: PackingConfig,
    max_tokens: int,
    remat: Literal["full", "attention", "gate", "dots", "none"] = "attention",
) -> Config:
    """Returns PipelineRL on a slice: bfloat16 compute, float32 master weights and AdamW."""
    base = pipelinerl.pipelinerl()
    return dataclasses.replace(
        base,
        preset=preset,
        run=RunConfig(name=preset.replace("_", "-"), num_updates=base.run.num_updates),
        model=ModelConfig(compute_dtype="bfloat16", served_dtype="bfloat16", remat=remat, max_tokens=max_tokens),
        sampling=SamplingConfig(max_response_tokens=max_tokens - 1024),
        packing=packing,
        mesh=mesh,
    )


def pick(preset: str, model: str, sizes: dict[str, Config]) -> Config:
    """Returns the config for a model; "" selects the default. Raises ValueError for an unknown model."""
    name = model or next(c.model for c in CASES if c.preset == preset)
    if name not in sizes:
        raise ValueError(f"no model {name!r}; expected {', '.join(f'{preset}:{m}' for m in sizes)}")
    return sizes[name]


def tpu_v5e_16(model: str = "") -> Config:
    """16 chips of v5e (topology v5e:4x4, 15.75 GiB each): Qwen3-1.7B in rows of 16k tokens, one per chip.

    Weights and rows are split over all chips (fsdp). The residual stream of 28 layers dominates the memory.
    """
    preset = "tpu_v5e_16"
    small = slice_config(
        preset, mesh=MeshConfig(fsdp=16), packing=PackingConfig(rows=16, row_tokens=16384), max_tokens=16384
    )
    return pick(preset, model, {"Qwen3-1.7B": small})


def tpu_v5p_128(model: str = "") -> Config:
    """128 chips of v5p (topology v5p:4x4x8, 95.74 GiB each): Qwen2.5-32B, or the mixture of experts Qwen3-30B-A3B.

    Rows have 16k tokens, one per chip, and weights are split over all chips. The mixture of experts is split the same
    way: with this many tokens per chip, gathering all experts of a layer costs no more than sending tokens to experts,
    and the router cannot unbalance the load. Google's name of this slice is v5p-256, by its TensorCores.
    """
    preset = "tpu_v5p_128"
    config = slice_config(
        preset, mesh=MeshConfig(fsdp=128), packing=PackingConfig(rows=128, row_tokens=16384), max_tokens=16384
    )
    return pick(preset, model, {"Qwen2.5-32B": config, "Qwen3-30B-A3B": config})


def tpu_v5p_64(model: str = "") -> Config:
    """64 chips of v5p (topology v5p:4x4x4, 95.74 GiB each): Qwen2.5-7B in rows of 32k tokens, one per chip.

    The gate's activations are kept (remat=gate): the step compiles to 77.1 GiB, and its implied MFU is 56% instead of
    53% (`tests/bench/tpu_mfu`).
    Google's name of this slice is v5p-128, by its TensorCores.
    """
    preset = "tpu_v5p_64"
    medium = slice_config(
        preset,
        mesh=MeshConfig(fsdp=64),
        packing=PackingConfig(rows=64, row_tokens=32768),
        max_tokens=32768,
        remat="gate",
    )
    return pick(preset, model, {"Qwen2.5-7B": medium})


def tpu_v6e_256(model: str = "") -> Config:
    """256 chips of v6e (topology v6e:16x16, 31.25 GiB each): Qwen2.5-32B in rows of 8k tokens, one per chip."""
    preset = "tpu_v6e_256"
    dense = slice_config(
        preset, mesh=MeshConfig(fsdp=256), packing=PackingConfig(rows=256, row_tokens=8192), max_tokens=8192
    )
    return pick(preset, model, {"Qwen2.5-32B": dense})
