"""Preset sizes: `tiny` (two CPU cores, minutes) and `paper` (experiments of the paper).

Each preset module defines rounds, admission, publishing and the paper's numbers (`PaperSize`) with their section. This
module holds the settings shared by all presets. To train your own model, set --config.model.path and
--config.prompts.path. Presets set no devices: use mesh.*, actor.devices and actor.tensor_parallel_size.
"""

import dataclasses
from typing import Any

from configs.sections import (
    ActorConfig,
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    PromptsConfig,
    RunConfig,
    SamplingConfig,
)

IN_FLIGHT = ("pipelinerl", "pipelinerl_ess", "roll_flash")
"""Presets that publish weights after every update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperSize:
    """Numbers of a paper's experiments that do not belong to its method."""

    num_updates: int
    max_tokens: int
    """Largest number of tokens per sequence, prompt and response together."""
    max_response_tokens: int
    optimizer: OptimizerConfig
    max_num_seqs: int = 256
    """Sequences per engine. The default is vLLM's, for papers that do not give it."""


def sections(size: str, preset: str, paper: PaperSize) -> dict[str, Any]:
    """Returns the config sections that depend on the size. Raises ValueError for an unknown size."""
    if size == "tiny":
        return _tiny(preset)
    if size == "paper":
        return _paper(preset, paper)
    raise ValueError(f"no size {size!r}; expected tiny or paper, for example {preset}:tiny")


def _tiny(preset: str) -> dict[str, Any]:
    """Returns a run on sums of three one-digit numbers with a two-layer model and 128 samples per update."""
    return dict(
        run=RunConfig(name=f"tiny-{preset}", num_updates=240),
        model=ModelConfig(max_tokens=32),
        prompts=PromptsConfig(
            task="chain_sum",
            task_args={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            pattern=r":\s*(.*=)",
            verifier="reasoning_gym",
        ),
        sampling=SamplingConfig(max_response_tokens=6),
        # At a constant step size, gradient noise stops the rise of the reward early.
        # With in-flight updates the lag is 1 to 4 steps, and only the step size bounds the policy change. At a constant
        # 5e-4, the KL to the sampling policy is ten times that of other presets, and the reward oscillates.
        optimizer=OptimizerConfig(learning_rate=4e-4 if preset in IN_FLIGHT else 5e-4, schedule="linear"),
        packing=PackingConfig(rows=4, row_tokens=128),
        checkpoint=CheckpointConfig(every_n_steps=40),
        evaluation=EvaluationConfig(num_problems=256, every_n_steps=40),
        actor=ActorConfig(max_num_seqs=256, enforce_eager=True, kv_cache_gib=1),
    )


def _paper(preset: str, paper: PaperSize) -> dict[str, Any]:
    """Returns a run of billions of parameters on accelerators; it requires model.path and prompts.path.

    No paper gives the sampling temperature, the packing of micro-batches, or the checkpoint and evaluation intervals.
    """
    return dict(
        run=RunConfig(name=preset, num_updates=paper.num_updates),
        model=ModelConfig(compute_dtype="bfloat16", served_dtype="bfloat16", max_tokens=paper.max_tokens),
        prompts=PromptsConfig(verifier="math"),
        sampling=SamplingConfig(max_response_tokens=paper.max_response_tokens),
        optimizer=paper.optimizer,
        packing=PackingConfig(rows=8, row_tokens=max(16384, paper.max_tokens)),
        checkpoint=CheckpointConfig(every_n_steps=48),
        evaluation=EvaluationConfig(num_problems=500, every_n_steps=48),
        actor=ActorConfig(max_num_seqs=paper.max_num_seqs, prefix_caching=True, verifier_workers=8),
    )
