"""Preset of supervised fine-tuning: `sft`, for any model, and `sft:tiny` on two CPU cores in minutes."""

import dataclasses

from configs.schema import Config
from configs.sections import (
    CheckpointConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    PromptsConfig,
    PublishConfig,
    RoundsConfig,
    RunConfig,
    SamplingConfig,
    SftConfig,
)


def sft(size: str = "model") -> Config:
    """Supervised fine-tuning on prompts with responses, or conversations, for launch.sft.

    Of size `model`, set model.path, prompts.path and run.num_updates. Of size `tiny`, the quickstart's model learns the
    answers of sums.
    """
    if size not in ("model", "tiny"):
        raise ValueError(f"no size {size!r}; expected model or tiny, for example sft:tiny")
    config = Config(
        preset="sft",
        run=RunConfig(name="sft", num_updates=500),
        model=ModelConfig(compute_dtype="bfloat16", served_dtype="bfloat16", max_tokens=4096),
        rounds=RoundsConfig(groups_per_round=1, groups_per_update=1),
        publish=PublishConfig(probe_every_n_publishes=0),
        loss=LossConfig(name="sft"),
        sft=SftConfig(rows_per_update=64),
        optimizer=OptimizerConfig(learning_rate=1e-5, schedule="cosine", warmup_steps=20),
        packing=PackingConfig(rows=8, row_tokens=8192, auto=True),
        checkpoint=CheckpointConfig(every_n_steps=100),
        evaluation=EvaluationConfig(num_problems=256, every_n_steps=50),
    )
    if size == "model":
        return config
    return dataclasses.replace(
        config,
        run=RunConfig(name="tiny-sft", num_updates=60),
        model=ModelConfig(max_tokens=32),
        prompts=PromptsConfig(
            task="chain_sum",
            task_args={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            pattern=r":\s*(.*=)",
        ),
        sampling=SamplingConfig(max_response_tokens=6),
        optimizer=OptimizerConfig(learning_rate=5e-4, schedule="linear"),
        packing=PackingConfig(rows=4, row_tokens=128),
        checkpoint=CheckpointConfig(every_n_steps=20),
        evaluation=EvaluationConfig(num_problems=256, every_n_steps=20),
    )
