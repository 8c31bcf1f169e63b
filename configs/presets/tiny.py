"""Presets of minutes on two CPU cores: `tiny`, `tiny_calculator`, `tiny_code`, `tiny_guess`."""

import dataclasses

from configs.presets import rolloutpipe
from configs.schema import Config
from configs.sections import (
    CheckpointConfig,
    EnvironmentsConfig,
    EvaluationConfig,
    ModelConfig,
    PackingConfig,
    PromptsConfig,
    RewardsConfig,
    SamplingConfig,
)


def tiny() -> Config:
    """`rolloutpipe` on two CPU cores in minutes, with larger updates, so that the reward rises above 0.9.

    At 128 samples per update, gradient noise stops the rise at about 0.8. An update has 512 here.
    """
    config = rolloutpipe.rolloutpipe("tiny")
    return dataclasses.replace(
        config,
        preset="tiny",
        run=dataclasses.replace(config.run, name="tiny", num_updates=400),
        rounds=dataclasses.replace(config.rounds, groups_per_round=128, groups_per_update=64),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-3),
        packing=dataclasses.replace(config.packing, rows=16),
        actor=dataclasses.replace(config.actor, max_num_seqs=512),
    )


def tiny_calculator() -> Config:
    """`rolloutpipe` on arithmetic that the model can only solve with a calculator tool, on two CPU cores."""
    config = rolloutpipe.rolloutpipe("tiny")
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


def tiny_code() -> Config:
    """`rolloutpipe` on code: short functions, scored by test cases in the sandbox, on two CPU cores.

    Write the problems first with `python -m launch.tools.write_tasks code`, or set another file (`prompts.path`).
    """
    config = rolloutpipe.rolloutpipe("tiny")
    return dataclasses.replace(
        config,
        preset="tiny_code",
        run=dataclasses.replace(config.run, name="tiny-code", num_updates=60),
        model=ModelConfig(max_tokens=80),
        prompts=PromptsConfig(path="data/code/train.jsonl", verifier="code"),
        # Correct functions take microseconds, so one that takes a second does not terminate.
        rewards=RewardsConfig(code_in="text", min_timeout_s=0.5, max_timeout_s=2.0, sandbox_memory_mib=256),
        sampling=SamplingConfig(max_response_tokens=44),
        rounds=dataclasses.replace(config.rounds, groups_per_round=16, groups_per_update=8),
        packing=PackingConfig(rows=8, row_tokens=512),
        checkpoint=CheckpointConfig(every_n_steps=20),
        evaluation=EvaluationConfig(num_problems=64, every_n_steps=20),
        actor=dataclasses.replace(config.actor, max_num_seqs=128, verifier_workers=2),
    )


def tiny_guess() -> Config:
    """`rolloutpipe` on a multi-turn environment: guessing a number from higher and lower hints, on two CPU cores."""
    config = rolloutpipe.rolloutpipe("tiny")
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
