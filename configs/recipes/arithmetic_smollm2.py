"""SmolLM2-135M-Instruct learns sums and differences of numbers below a hundred, on two CPU cores.

Few answers are right at first, because the model explains instead of giving a number and adds badly. Evaluation
includes three question wordings that are not trained (`configs/tasks/arithmetic.py`). Download the model and write the
rows:

    python -m launch.tools.get_model smollm2 --out=models/smollm2
    python -m launch.tools.write_tasks arithmetic --out=data/arithmetic

Run it with `--config=arithmetic_smollm2`, or with another schedule, for example `arithmetic_smollm2:rolloutpipe`.
"""

import dataclasses

from configs.presets import schedule
from configs.schema import Config
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


def get_config(preset: str = "pipelinerl") -> Config:
    """Returns the config of `arithmetic_smollm2`, or of `arithmetic_smollm2:rolloutpipe`."""
    base = schedule(preset, groups_per_round=8, samples_per_group=8, groups_per_update=4)
    return dataclasses.replace(
        base,
        # Most groups are all wrong at first and all right later; the filter replaces them.
        rounds=dataclasses.replace(base.rounds, filter_zero_variance=True),
        run=RunConfig(name=f"arithmetic-smollm2-{preset}", num_updates=48),
        # Prompts have 25 to 41 tokens; the model's default system prompt would add 18.
        model=ModelConfig(path="models/smollm2", max_tokens=72),
        prompts=PromptsConfig(
            path="data/arithmetic/train.jsonl",
            eval_path="data/arithmetic/held_out.jsonl",
            system_prompt="Answer with the result.",
            verifier="math",
            answer_in="number",
        ),
        sampling=SamplingConfig(max_response_tokens=24),
        # Without the bonus, entropy falls from 1.4 to 0.1 nats per token in 25 updates, and exploration ends.
        loss=dataclasses.replace(base.loss, entropy_coef=0.02),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        # A prompt is twice as long as its answers, and eight of them share it.
        packing=PackingConfig(rows=4, row_tokens=256, auto=True, share_prompts=True),
        # With thirty float32 layers, engine and learner differ by up to 1e-4 nats on rare tokens. Weights of another
        # step differ a hundred times as much.
        publish=dataclasses.replace(base.publish, parity_bound=5e-4),
        checkpoint=CheckpointConfig(every_n_steps=24),
        evaluation=EvaluationConfig(num_problems=256, every_n_steps=12),
        actor=ActorConfig(max_num_seqs=128, enforce_eager=True, kv_cache_gib=1),
    )
