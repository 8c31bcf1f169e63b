"""The sizes that presets come in: `tiny` (two CPU cores, minutes) and `paper` (what the papers ran).

A preset says how rounds, admission and publishing work; a size says everything else. A real model and data
set are other values of the same fields: --config.model.path=... --config.prompts.path=...
"""

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


def sections(size: str, preset: str) -> dict[str, Any]:
    """The sections of a `Config` that depend on the size.

    Raises:
      ValueError: no such size.
    """
    sizes = {"tiny": _tiny, "paper": _paper}
    if size not in sizes:
        raise ValueError(f"no size {size!r}; presets come as {', '.join(sizes)}, as in configs/{preset}.py:tiny")
    return sizes[size](preset)


def _tiny(preset: str) -> dict[str, Any]:
    """Sums of three numbers of one digit, a two-layer model, 128 samples an update."""
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
        # In flight the lag is 1 to 4 steps and nothing but the step size bounds the policy's change: at a constant
        # 5e-4 the KL to the sampling policy is ten times the other presets', and the reward swings.
        optimizer=OptimizerConfig(learning_rate=4e-4, schedule="linear")
        if preset in ("pipelinerl", "roll_flash")
        else OptimizerConfig(learning_rate=5e-4),
        packing=PackingConfig(rows=4, row_tokens=128),
        checkpoint=CheckpointConfig(every_n_steps=40),
        evaluation=EvaluationConfig(num_problems=256, every_n_steps=40),
        actor=ActorConfig(max_num_seqs=256, enforce_eager=True, kv_cache_gib=1),
    )


def _paper(preset: str) -> dict[str, Any]:
    """A model of billions of parameters on accelerators: give model.path and prompts.path."""
    return dict(
        run=RunConfig(name=preset, num_updates=960),
        model=ModelConfig(compute_dtype="bfloat16", served_dtype="bfloat16", max_tokens=8192),
        prompts=PromptsConfig(verifier="math"),
        sampling=SamplingConfig(max_response_tokens=7168),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
        packing=PackingConfig(rows=8, row_tokens=16384),
        checkpoint=CheckpointConfig(every_n_steps=48),
        evaluation=EvaluationConfig(num_problems=500, every_n_steps=48),
        actor=ActorConfig(max_num_seqs=256, prefix_caching=True, verifier_workers=8),
    )
