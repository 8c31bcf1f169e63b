"""SmolLM2-135M-Instruct learns word problems, on two CPU cores in hours.

Training mixes chains of one to three steps with small numbers (`configs/tasks/word_problems.py`) and the templates of
GSM-Symbolic. Few are solved at first, so supervised fine-tuning on the chains' solutions comes first. Both train
adapters, as in `arithmetic_smollm2`. The curriculum prefers sources that are solved half the time. Download the model,
write the rows, and train twice:

    python -m launch.tools.get_model smollm2 --out=models/smollm2
    python -m launch.tools.write_tasks word_problems --out=data/word_problems
    python -m launch.sft --config=gsm_smollm2:sft
    python -m launch.local --config=gsm_smollm2

Use another schedule for the last command with, for example, `gsm_smollm2:rolloutpipe`.
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
from configs.sections.prompts import PromptSource

DATA = "data/word_problems"
SFT_NAME, SFT_UPDATES = "gsm-smollm2-sft", 400
LORA = LoraConfig(rank=64)
SYSTEM_PROMPT = "Work it out."  # the model's default would add 12 tokens to the 60 to 90 of a prompt


def get_config(preset: str = "pipelinerl") -> Config:
    """Returns the config of `gsm_smollm2`, of `gsm_smollm2:rolloutpipe`, or of `gsm_smollm2:sft`.

    A preset's model is the one that `gsm_smollm2:sft` writes.
    """
    own = {
        name: PromptSource(path=f"{DATA}/{name}.jsonl", eval_path=f"{DATA}/{name}_held_out.jsonl", weight=weight)
        for name, weight in (("one_step", 1.0), ("two_steps", 2.0), ("three_steps", 2.0))
    }
    if preset == "sft":
        return _warm_start(own)
    base = schedule(preset, groups_per_round=8, samples_per_group=8, groups_per_update=8)
    return dataclasses.replace(
        base,
        # A group whose answers are all right or all wrong teaches nothing; the filter replaces it.
        rounds=dataclasses.replace(base.rounds, filter_zero_variance=True),
        # With the seed of the warm start, the first prompts would be the rows that it has trained on.
        run=RunConfig(name=f"gsm-smollm2-{preset}", num_updates=200, seed=1),
        model=ModelConfig(path=f"runs/{SFT_NAME}/model-{SFT_UPDATES}", max_tokens=320),
        lora=LORA,
        prompts=PromptsConfig(
            system_prompt=SYSTEM_PROMPT,
            verifier="math",
            answer_in="number",
            mixture={**own, "gsm_symbolic": PromptSource(task="gsm_symbolic", weight=1.0)},
            curriculum="learnable",
        ),
        sampling=SamplingConfig(max_response_tokens=96),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        # A group of a chain has 300 to 450 tokens with its shared prompt, one of GSM-Symbolic at most 960.
        packing=PackingConfig(rows=1, row_tokens=960, share_prompts=True),
        # With thirty float32 layers, engine and learner differ by up to 1e-4 nats on rare tokens. Weights of another
        # step differ a hundred times as much.
        publish=dataclasses.replace(base.publish, parity_bound=5e-4),
        checkpoint=CheckpointConfig(every_n_steps=20),
        evaluation=EvaluationConfig(num_problems=256, every_n_steps=20, temperature=0.0),
        actor=ActorConfig(max_num_seqs=64, enforce_eager=True, kv_cache_gib=1),
    )


def _warm_start(sources: dict[str, PromptSource]) -> Config:
    return dataclasses.replace(
        sft(),
        run=RunConfig(name=SFT_NAME, num_updates=SFT_UPDATES),
        model=ModelConfig(path="models/smollm2", max_tokens=320),
        lora=LORA,
        prompts=PromptsConfig(system_prompt=SYSTEM_PROMPT, mixture=sources, verifier="math", answer_in="number"),
        sft=SftConfig(rows_per_update=8),
        optimizer=OptimizerConfig(learning_rate=2e-3, schedule="linear", warmup_steps=4),
        packing=PackingConfig(rows=1, row_tokens=896),  # eight rows of about 103 tokens
        checkpoint=CheckpointConfig(every_n_steps=SFT_UPDATES),
        evaluation=EvaluationConfig(num_problems=64, every_n_steps=0),
    )
