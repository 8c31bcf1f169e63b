"""Competition mathematics with Qwen3-4B, as in DeepScaleR's first stage: responses of 8k tokens.

Sized for a TPU v5p slice of 2x4x4 as the learner, with GPU actors. The rows are those of DeepScaleR's preview set (some
40,000, from AIME, AMC, Omni-MATH and STILL) on the Hugging Face Hub; held out are the 30 of AIME 2024, 16 samples
of each. The model:

    python -m launch.tools.get_model Qwen/Qwen3-4B --out=models/Qwen3-4B

Compiled for that slice, not run on it: 53.6 of 95.74 GiB a chip, an update of the longest sequences in 53.9 s by
estimate, at an MFU of 38% (`tests/bench/results/tpu.md`): attention is counted over whole rows, which hold two of the
longest sequences.

Later stages go on from the model that this one ends with, at --config.sampling.max_response_tokens=16384 and 24576
with --config.model.max_tokens and --config.packing.row_tokens to match.
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
    """`deepscaler_qwen3_4b`, or `deepscaler_qwen3_4b:rolloutpipe`."""
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
        # 30 problems say something when each is sampled often: 16 times, as AIME is reported. That is a response to 43
        # that are trained on, and training keeps three quarters of the engines meanwhile.
        evaluation=EvaluationConfig(
            num_problems=30, every_n_steps=20, k=16, temperature=0.6, top_p=0.95, max_engine_fraction=0.25
        ),
        actor=ActorConfig(max_num_seqs=256, prefix_caching=True, verifier_workers=16),
    )
