"""What the presets for TPU slices share, and which model each was compiled with.

A slice is named by its chips here: v5p-64 is the topology 4x4x4, 64 chips. Google's own names of v5p (and v4)
slices count TensorCores, two a chip, so its console calls that slice v5p-128; v5e and v6e have one core a chip.

These are whole training configurations at PipelineRL's settings (in-flight updates, batch 1024), to which
--config.model.path=... and --config.prompts.path=... are given. `launch.compile_tpu` needs neither. Recipes
(configs/recipes) name both.
"""

import dataclasses
from typing import Literal

from configs import pipelinerl
from configs.schema import Config
from configs.sections import MeshConfig, ModelConfig, PackingConfig, RunConfig, SamplingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceCase:
    """A preset with the slice and the model that it was tuned for."""

    preset: str
    topology: str
    """As libtpu names it."""
    model: str
    """A name in `configs.model_sizes.MODEL_SIZES`."""
    is_recipe: bool = False
    """Its file is in configs/recipes, and is for that model alone."""

    @property
    def key(self) -> str:
        """A short name of the case."""
        return f"{self.model}@{self.topology}"

    @property
    def config_path(self) -> str:
        """For --config."""
        return f"configs/recipes/{self.preset}.py" if self.is_recipe else f"configs/{self.preset}.py:{self.model}"


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
"""What `python -m launch.compile_tpu --all` compiles; the first case of a preset is its default."""


def slice_config(
    preset: str,
    *,
    mesh: MeshConfig,
    packing: PackingConfig,
    max_tokens: int,
    remat: Literal["full", "attention", "dots", "none"] = "attention",
) -> Config:
    """PipelineRL on a slice: bfloat16 compute over float32 master weights and AdamW."""
    base = pipelinerl.get_config()
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
    """The configuration for a model; the preset's default for "".

    Raises:
      ValueError: the preset has none for it.
    """
    name = model or next(c.model for c in CASES if c.preset == preset)
    if name not in sizes:
        raise ValueError(f"no model {name!r}; {preset} comes as {', '.join(f'configs/{preset}.py:{m}' for m in sizes)}")
    return sizes[name]
