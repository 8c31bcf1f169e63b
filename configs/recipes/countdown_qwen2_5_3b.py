"""Countdown with Qwen2.5-3B: make a number of three or four others, as in TinyZero.

Sized for a TPU v5e slice of 4x4 as the learner, with GPU actors. Problems are made by index (reasoning-gym's family),
so there is no data to fetch; one in ten is held out. The model, a base model that has not learned to reason:

    python -m launch.tools.get_model Qwen/Qwen2.5-3B --out=models/Qwen2.5-3B

Compiled for that slice, not run on it: 10.8 of 15.75 GiB a chip, an update of the longest sequences in 11.9 s by
estimate, at an MFU of 39% (`tests/bench/results/tpu.md`).
"""

import dataclasses

from configs.presets import schedule
from configs.schema import Config
from configs.sections import (
    ActorConfig,
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    PromptsConfig,
    RunConfig,
    SamplingConfig,
)


def get_config(preset: str = "pipelinerl") -> Config:
    """`countdown_qwen2_5_3b`, or `countdown_qwen2_5_3b:rolloutpipe`."""
    return dataclasses.replace(
        schedule(preset, groups_per_round=256, samples_per_group=8, groups_per_update=64, size="paper"),
        run=RunConfig(name=f"countdown-{preset}", num_updates=400),
        model=ModelConfig(path="models/Qwen2.5-3B", compute_dtype="bfloat16", served_dtype="bfloat16", max_tokens=1536),
        prompts=PromptsConfig(
            task="countdown",
            task_args={"min_numbers": 3, "max_numbers": 4, "max_value": 99, "min_target": 10, "max_target": 99},
            verifier="reasoning_gym",
            system_prompt=(
                "Think first, trying one combination after the other. Then give the expression alone within "
                "<answer> and </answer>."
            ),
        ),
        sampling=SamplingConfig(max_response_tokens=1024),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        mesh=MeshConfig(fsdp=16),
        packing=PackingConfig(rows=16, row_tokens=6144),
        checkpoint=CheckpointConfig(every_n_steps=50),
        evaluation=EvaluationConfig(num_problems=512, every_n_steps=25),
        actor=ActorConfig(max_num_seqs=256, prefix_caching=True, verifier_workers=8),
    )
