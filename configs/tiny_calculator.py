"""`tiny` on an environment with a tool, arithmetic that only a calculator can do, on two CPU cores."""

import dataclasses

from configs import tiny
from configs.schema import Config
from configs.sections import (
    CheckpointConfig,
    EnvironmentsConfig,
    EvaluationConfig,
    ModelConfig,
    PackingConfig,
    PromptsConfig,
    SamplingConfig,
)


def get_config() -> Config:
    """`configs/tiny_calculator.py`."""
    config = tiny.get_config()
    return dataclasses.replace(
        config,
        preset="tiny_calculator",
        run=dataclasses.replace(config.run, name="tiny-calculator", num_updates=100),
        model=ModelConfig(max_tokens=80),
        prompts=PromptsConfig(environment="calculator", environment_args={"style": "short", "tool": "calc"}),
        environments=EnvironmentsConfig(max_turns=3, max_processes=64),
        sampling=SamplingConfig(max_response_tokens=64),
        rounds=dataclasses.replace(config.rounds, groups_per_round=16, groups_per_update=8),
        packing=PackingConfig(rows=8, row_tokens=256),
        checkpoint=CheckpointConfig(every_n_steps=20),
        evaluation=EvaluationConfig(num_problems=128, every_n_steps=20),
        actor=dataclasses.replace(config.actor, max_num_seqs=64, prefix_caching=True),
    )
