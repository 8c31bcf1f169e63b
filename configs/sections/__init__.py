"""Sections of a `Config`."""

from configs.sections.actor import ActorConfig, EnvironmentsConfig, SamplingConfig
from configs.sections.correction import CorrectionConfig
from configs.sections.critic import CriticConfig
from configs.sections.evaluation import EvaluationConfig, EvaluationSet
from configs.sections.loss import LossConfig
from configs.sections.model import (
    HelpersConfig,
    LearnerConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
)
from configs.sections.prompts import PromptsConfig
from configs.sections.rewards import JudgeConfig, RewardsConfig
from configs.sections.run import CheckpointConfig, RunConfig, SamplesConfig, StoreConfig, SupervisionConfig
from configs.sections.schedule import AdmissionConfig, PublishConfig, RoundsConfig
from configs.sections.sft import SftConfig

__all__ = [
    "ActorConfig",
    "AdmissionConfig",
    "CheckpointConfig",
    "CorrectionConfig",
    "CriticConfig",
    "EnvironmentsConfig",
    "EvaluationConfig",
    "EvaluationSet",
    "HelpersConfig",
    "JudgeConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PackingConfig",
    "PromptsConfig",
    "PublishConfig",
    "RewardsConfig",
    "RoundsConfig",
    "RunConfig",
    "SamplesConfig",
    "SamplingConfig",
    "SftConfig",
    "StoreConfig",
    "SupervisionConfig",
]
