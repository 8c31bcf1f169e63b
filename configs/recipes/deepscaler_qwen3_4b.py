"""Competition mathematics with Qwen3-4B, as in DeepScaleR's first stage: responses of 8k tokens.

The learner is sized for a TPU v5p slice of 2x4x4, with GPU actors. Training uses DeepScaleR's preview dataset on the
Hugging Face Hub (about 40,000 rows from AIME, AMC, Omni-MATH and STILL). Evaluation uses the 30 problems of AIME 2024
with 16 samples each. Download the model:

    python -m launch.tools.get_model Qwen/Qwen3-4B --out=models/Qwen3-4B

Compiled for that slice, not run on it: 53.6 of 95.74 GiB per chip. Estimated time for an update of the longest
sequences: 53.9 s, at an MFU of 38% (`tests/bench/results/tpu.md`). The estimate counts attention over whole rows, which
hold two of the longest sequences.

Later stages start from the resulting model with --config.sampling.max_response_tokens=16384 and then 24576. Raise
--config.model.max_tokens and --config.packing.row_tokens accordingly.
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
    """Returns the config of `deepscaler_qwen3_4b`, or of `deepscaler_qwen3_4b:rolloutpipe`."""
    return dataclasses.replace(
        schedule(preset, groups_per_round=512, samples_per_group=8, groups_per_update=128, size="paper"),
        run=RunConfig(name=f"deepscaler-{preset}", num_updates=1000),
        model=ModelConfig(path="models/Qwen3-4B", compute_dtype="bfloat16", served_dtype="bfloat16", max_tokens=9216),
        prompts=PromptsConfig(
            path="hf:agentica-org/DeepScaleR-Preview-Dataset",
            eval_path="hf:HuggingFaceH4/aime_2024",
            prompt_field="problem",
            verifier="math",
            system_prompt="Reason step by step, and put the final answer within \\boxed{}.",
        ),
        sampling=SamplingConfig(max_response_tokens=8192),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        mesh=MeshConfig(fsdp=32),
        packing=PackingConfig(rows=32, row_tokens=18432),
        checkpoint=CheckpointConfig(every_n_steps=20),
        # 30 problems need several samples each: 16, as AIME results report. That is 1 response per 43 trained ones, and
        # training keeps three quarters of the engines meanwhile.
        evaluation=EvaluationConfig(
            num_problems=30, every_n_steps=20, k=16, temperature=0.6, top_p=0.95, max_engine_fraction=0.25
        ),
        actor=ActorConfig(max_num_seqs=256, prefix_caching=True, verifier_workers=16),
    )
