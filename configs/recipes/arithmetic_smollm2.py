"""SmolLM2-135M-Instruct learns sums and differences of numbers below a hundred, on two CPU cores.

The model adds badly, so reinforcement learning alone finds few right answers. Supervised fine-tuning on worked answers
comes first. Both train adapters, whose updates take two thirds of the time. Evaluation includes three question wordings
that are not trained (`configs/tasks/arithmetic.py`). Download the model, write the rows, and train twice:

    python -m launch.tools.get_model smollm2 --out=models/smollm2
    python -m launch.tools.write_tasks arithmetic --out=data/arithmetic
    python -m launch.sft --config=arithmetic_smollm2:sft
    python -m launch.local --config=arithmetic_smollm2

Use another schedule for the last command with, for example, `arithmetic_smollm2:rolloutpipe`.
"""

import dataclasses

from configs.presets import schedule
from configs.presets.sft import sft
from configs.schema import Config
from configs.sections import (
    ActorConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    PromptsConfig,
    RunConfig,
    SamplingConfig,
    SftConfig,
)

SFT_NAME, SFT_UPDATES = "arithmetic-smollm2-sft", 400
LORA = LoraConfig(rank=64)


def get_config(preset: str = "pipelinerl") -> Config:
    """Returns the config of `arithmetic_smollm2`, of `arithmetic_smollm2:rolloutpipe`, or of `arithmetic_smollm2:sft`.

    A preset's model is the one that `arithmetic_smollm2:sft` writes.
    """
    # Prompts have 26 to 44 tokens; the model's default system prompt would add 16.
    prompts = PromptsConfig(
        path="data/arithmetic/up_to_99.jsonl",
        eval_path="data/arithmetic/held_out.jsonl",
        system_prompt="Work it out.",
        verifier="math",
        answer_in="number",
    )
    if preset == "sft":
        return _warm_start(prompts)
    base = schedule(preset, groups_per_round=8, samples_per_group=8, groups_per_update=8)
    return dataclasses.replace(
        base,
        # A group whose answers are all right teaches nothing; the filter replaces it.
        rounds=dataclasses.replace(base.rounds, filter_zero_variance=True),
        # With the seed of the warm start, the first prompts would be the rows that it has trained on.
        run=RunConfig(name=f"arithmetic-smollm2-{preset}", num_updates=30, seed=1),
        model=ModelConfig(path=f"runs/{SFT_NAME}/model-{SFT_UPDATES}", max_tokens=88),
        lora=LORA,
        prompts=prompts,
        sampling=SamplingConfig(max_response_tokens=40),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        # A prompt is longer than its answers, and eight of them share it. Such a group has about 190 tokens, and a row
        # holds one.
        packing=PackingConfig(rows=1, row_tokens=240, share_prompts=True),
        # With thirty float32 layers, engine and learner differ by up to 1e-4 nats on rare tokens. Weights of another
        # step differ a hundred times as much.
        publish=dataclasses.replace(base.publish, parity_bound=5e-4),
        checkpoint=CheckpointConfig(every_n_steps=6),
        evaluation=EvaluationConfig(num_problems=256, every_n_steps=6, temperature=0.0),
        actor=ActorConfig(max_num_seqs=128, enforce_eager=True, kv_cache_gib=1),
    )


def _warm_start(prompts: PromptsConfig) -> Config:
    return dataclasses.replace(
        sft(),
        run=RunConfig(name=SFT_NAME, num_updates=SFT_UPDATES),
        model=ModelConfig(path="models/smollm2", max_tokens=88),
        lora=LORA,
        prompts=prompts,
        sft=SftConfig(rows_per_update=8),
        optimizer=OptimizerConfig(learning_rate=2e-3, schedule="linear", warmup_steps=4),
        packing=PackingConfig(rows=1, row_tokens=464),  # eight rows of about 50 tokens
        checkpoint=CheckpointConfig(every_n_steps=SFT_UPDATES),
        evaluation=EvaluationConfig(num_problems=64, every_n_steps=0),
    )
