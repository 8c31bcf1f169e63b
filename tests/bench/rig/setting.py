"""What the benches' configurations share: the tiny task and model, and nothing beside training and sampling."""

import dataclasses
import pathlib

from configs.schema import Config
from configs.sections import (
    ActorConfig,
    AdmissionConfig,
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
)
from launch.startup.tiny_model import cached_tiny_model

PROMPTS = PromptsConfig(
    task="chain_sum",
    task_args={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    pattern=r":\s*(.*=)",
    verifier="reasoning_gym",
)
"""The tiny presets' task, so that its model is made once for all."""
FIFO, ROUND_END = AdmissionConfig(policy="fifo"), PublishConfig(when="round_end")
GRPO = LossConfig(name="grpo_clip", advantage="grpo", normalization="sequence")
TRUNCATED = LossConfig(name="truncated_is", advantage="mean_baseline", max_weight=5.0, normalization="token")
"""PipelineRL's."""
_PROMPT_ROOM = 24
"""Tokens left for a prompt."""


def make_config(
    preset: str,
    *,
    num_updates: int,
    rounds: RoundsConfig,
    admission: AdmissionConfig = FIFO,
    publish: PublishConfig = ROUND_END,
    max_response_tokens: int,
    max_tokens: int | None = None,
    max_num_seqs: int,
    packing: PackingConfig,
    loss: LossConfig = GRPO,
    learning_rate: float = 1e-5,
    num_eval_problems: int = 0,
    seed: int = 0,
) -> Config:
    """A run that only samples and trains: no probe, no checkpoint before its end, no evaluation unless asked for.

    `max_tokens` is the engine's context, where it is to be another one than the responses need: all sessions of an
    engine have the same. The learning rate is small on purpose where lengths are replayed: rewards are noise there, and
    the policy should stay what it is.
    """
    return Config(
        preset=preset,
        run=RunConfig(num_updates=num_updates, seed=seed),
        model=ModelConfig(max_tokens=max_tokens or max_response_tokens + _PROMPT_ROOM),
        prompts=PROMPTS,
        sampling=SamplingConfig(max_response_tokens=max_response_tokens),
        rounds=rounds,
        admission=admission,
        publish=dataclasses.replace(publish, probe_every_n_publishes=0),
        loss=loss,
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        packing=packing,
        checkpoint=CheckpointConfig(every_n_steps=1_000_000),
        evaluation=EvaluationConfig(num_problems=num_eval_problems, every_n_steps=0),
        actor=ActorConfig(max_num_seqs=max_num_seqs, enforce_eager=True, kv_cache_gib=1, cpu_cores="0", lease_s=120.0),
    )


def tiny_model() -> pathlib.Path:
    """The tiny presets' model; made first if it is not cached."""
    config = make_config(
        "model",
        num_updates=2,
        rounds=RoundsConfig(groups_per_round=2, groups_per_update=1),
        max_response_tokens=8,
        max_num_seqs=8,
        packing=PackingConfig(),
    )
    return cached_tiny_model(config)
