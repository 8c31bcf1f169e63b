"""`tiny` on code: short functions, judged by test cases in the sandbox, on two CPU cores.

Write its problems first: `python -m launch.code_tasks code_tasks.jsonl`, or name another file (`prompts.path`).
"""

import dataclasses

from configs import tiny
from configs.schema import Config
from configs.sections import (
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    PackingConfig,
    PromptsConfig,
    RewardsConfig,
    SamplingConfig,
)


def get_config() -> Config:
    """`configs/tiny_code.py`."""
    config = tiny.get_config()
    return dataclasses.replace(
        config,
        preset="tiny_code",
        run=dataclasses.replace(config.run, name="tiny-code", num_updates=60),
        model=ModelConfig(max_tokens=80),
        prompts=PromptsConfig(path="code_tasks.jsonl", verifier="code"),
        # Functions of microseconds: what takes a second will not end.
        rewards=RewardsConfig(code_in="text", min_timeout_s=0.5, max_timeout_s=2.0, sandbox_memory_mib=256),
        sampling=SamplingConfig(max_response_tokens=44),
        rounds=dataclasses.replace(config.rounds, groups_per_round=16, groups_per_update=8),
        packing=PackingConfig(rows=8, row_tokens=512),
        checkpoint=CheckpointConfig(every_n_steps=20),
        evaluation=EvaluationConfig(num_problems=64, every_n_steps=20),
        actor=dataclasses.replace(config.actor, max_num_seqs=128, verifier_workers=2),
    )
