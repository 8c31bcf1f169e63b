"""SmolLM2-135M-Instruct learns word problems, on two CPU cores in hours.

Training mixes chains of one to three steps with small numbers (`configs/tasks/word_problems.py`) and the templates of
GSM-Symbolic. Few are solved at first, so supervised fine-tuning on the chains' solutions comes first. The curriculum
prefers sources that are solved half the time. Download the model, write the rows, and train twice:

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
SFT_NAME, SFT_UPDATES = "gsm-smollm2-sft", 60


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
    base = schedule(preset, groups_per_round=8, samples_per_group=8, groups_per_update=4)
    return dataclasses.replace(
        base,
        run=RunConfig(name=f"gsm-smollm2-{preset}", num_updates=400),
        model=ModelConfig(path=f"runs/{SFT_NAME}/model-{SFT_UPDATES}", max_tokens=320),
        prompts=PromptsConfig(
            verifier="math",
            answer_in="number",
            mixture={**own, "gsm_symbolic": PromptSource(task="gsm_symbolic", weight=1.0)},
            curriculum="learnable",
        ),
        sampling=SamplingConfig(max_response_tokens=96),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        packing=PackingConfig(rows=4, row_tokens=640, auto=True),
        # With thirty float32 layers, engine and learner differ by up to 1e-4 nats on rare tokens. Weights of another
        # step differ a hundred times as much.
        publish=dataclasses.replace(base.publish, parity_bound=5e-4),
        checkpoint=CheckpointConfig(every_n_steps=40),
        evaluation=EvaluationConfig(num_problems=192, every_n_steps=40),
        actor=ActorConfig(max_num_seqs=64, enforce_eager=True, kv_cache_gib=1),
    )


def _warm_start(sources: dict[str, PromptSource]) -> Config:
    return dataclasses.replace(
        sft(),
        run=RunConfig(name=SFT_NAME, num_updates=SFT_UPDATES),
        model=ModelConfig(path="models/smollm2", max_tokens=320),
        prompts=PromptsConfig(mixture=sources, verifier="math", answer_in="number"),
        sft=SftConfig(rows_per_update=24),
        optimizer=OptimizerConfig(learning_rate=1e-4, schedule="linear", warmup_steps=4),
        packing=PackingConfig(rows=4, row_tokens=640, auto=True),
        checkpoint=CheckpointConfig(every_n_steps=SFT_UPDATES),
        evaluation=EvaluationConfig(num_problems=96, every_n_steps=SFT_UPDATES),
    )
