"""GSM8K with Qwen2.5-1.5B, with a learner sized for a TPU v5e slice of 4x4 and GPU actors.

Training uses openai/gsm8k on the Hugging Face Hub, whose answers end in `#### N`; its test split is held out. A local
folder of these rows also works: --config.prompts.path=hf:/data/gsm8k. Download the model:

    python -m launch.tools.get_model Qwen/Qwen2.5-1.5B-Instruct --out=models/Qwen2.5-1.5B-Instruct

Compiled for that slice, not run on it: 7.2 of 15.75 GiB per chip. Estimated time for an update of the longest
sequences: 6.7 s, at an MFU of 37% (`tests/bench/results/tpu.md`). On other devices set --config.mesh.* and
--config.packing.rows (a multiple of mesh.fsdp).
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
    """Returns the config of `gsm8k_qwen2_5_1_5b`, or of `gsm8k_qwen2_5_1_5b:rolloutpipe`."""
    return dataclasses.replace(
        schedule(preset, groups_per_round=256, samples_per_group=8, groups_per_update=64, size="paper"),
        run=RunConfig(name=f"gsm8k-{preset}", num_updates=300),  # 2.6 epochs of 7,473 rows
        model=ModelConfig(
            path="models/Qwen2.5-1.5B-Instruct", compute_dtype="bfloat16", served_dtype="bfloat16", max_tokens=1536
        ),
        prompts=PromptsConfig(
            path="hf:openai/gsm8k",
            subset="main",
            eval_split="test",
            prompt_field="question",
            verifier="math",
            answer_in="number",
            system_prompt="Reason step by step, and put the final answer within \\boxed{}.",
        ),
        sampling=SamplingConfig(max_response_tokens=1024),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
        mesh=MeshConfig(fsdp=16),
        packing=PackingConfig(rows=16, row_tokens=8192),
        checkpoint=CheckpointConfig(every_n_steps=50),
        evaluation=EvaluationConfig(num_problems=1319, every_n_steps=25, temperature=0.0),
        actor=ActorConfig(max_num_seqs=256, prefix_caching=True, verifier_workers=8),
    )
