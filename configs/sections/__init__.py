"""The sections of a `Config`, one file each; a check of one section lives with it."""

from configs.sections.actor import ActorConfig
from configs.sections.admission import AdmissionConfig
from configs.sections.checkpoint import CheckpointConfig
from configs.sections.environments import EnvironmentsConfig
from configs.sections.evaluation import EvaluationConfig, EvaluationSet
from configs.sections.judge import JudgeConfig
from configs.sections.learner import LearnerConfig
from configs.sections.lora import LoraConfig
from configs.sections.loss import LossConfig
from configs.sections.mesh import MeshConfig
from configs.sections.model import ModelConfig
from configs.sections.optimizer import OptimizerConfig
from configs.sections.packing import PackingConfig
from configs.sections.prompts import PromptsConfig
from configs.sections.publish import PublishConfig
from configs.sections.rewards import RewardsConfig
from configs.sections.rounds import RoundsConfig
from configs.sections.run import RunConfig
from configs.sections.samples import SamplesConfig
from configs.sections.sampling import SamplingConfig
from configs.sections.store import StoreConfig
from configs.sections.supervision import SupervisionConfig

__all__ = [
    "ActorConfig",
    "AdmissionConfig",
    "CheckpointConfig",
    "EnvironmentsConfig",
    "EvaluationConfig",
    "EvaluationSet",
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
    "StoreConfig",
    "SupervisionConfig",
]
