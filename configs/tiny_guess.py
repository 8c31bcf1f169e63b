"""`tiny` on an environment of several turns, guessing a number by higher and lower, on two CPU cores."""

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
    """`configs/tiny_guess.py`."""
    config = tiny.get_config()
    return dataclasses.replace(
        config,
        preset="tiny_guess",
        run=dataclasses.replace(config.run, name="tiny-guess", num_updates=100),
        model=ModelConfig(max_tokens=64),
        prompts=PromptsConfig(environment="guess", environment_args={"style": "short"}),
        environments=EnvironmentsConfig(max_turns=5, max_processes=64),
        sampling=SamplingConfig(max_response_tokens=40),
        rounds=dataclasses.replace(config.rounds, groups_per_round=16, groups_per_update=8),
        packing=PackingConfig(rows=8, row_tokens=256),
        checkpoint=CheckpointConfig(every_n_steps=20),
        evaluation=EvaluationConfig(num_problems=128, every_n_steps=20),
        actor=dataclasses.replace(config.actor, max_num_seqs=64, prefix_caching=True),
    )
