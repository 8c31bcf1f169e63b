"""Config section of supervised fine-tuning."""

import dataclasses
from collections.abc import Mapping

from configs.sections.actor import ActorConfig, SamplingConfig
from configs.sections.base import CheckedSection, Count, check_unread
from configs.sections.loss import LossConfig
from configs.sections.loss_table import SUPERVISED
from configs.sections.model import HelpersConfig, ModelConfig
from configs.sections.prompts import PromptsConfig, SourceFields
from configs.sections.schedule import RoundsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig(CheckedSection):
    """Supervised fine-tuning on the rows of `prompts`, with loss.name=sft."""

    rows_per_update: Count = 32
    """Rows per update, which is one optimizer step."""
    response_field: str = "response"
    """Column with the text that the model learns to write after the prompt. A row without it must be a conversation: a
    list of messages in the column of the prompt, of which all assistant messages are trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.response_field:
            raise ValueError("sft.response_field must be the name of a column, got an empty name")

    def check_beside(
        self,
        *,
        model: ModelConfig,
        loss: LossConfig,
        prompts: PromptsConfig,
        sampling: SamplingConfig,
        rounds: RoundsConfig,
        actor: ActorConfig,
        helpers: HelpersConfig,
        sources: Mapping[str, SourceFields],
    ) -> None:
        """Raises ValueError if other sections ask for what supervised fine-tuning cannot do, or do not choose it."""
        if not loss.is_supervised:
            check_unread("sft", self, f"without loss.name={SUPERVISED}")
            return
        for name, got, wanted in (
            ("sampling.temperature", sampling.temperature, 1.0),
            ("rounds.epochs", rounds.epochs, 1),
            ("prompts.curriculum", prompts.curriculum, "none"),
            ("actor.colocated", actor.colocated, False),
            ("helpers.num_engines", helpers.num_engines, 0),
            ("model.routing_replay", model.routing_replay, False),
            ("loss.teacher_coef", loss.teacher_coef, 0.0),
            ("loss.kl_coef", loss.kl_coef, 0.0),
            ("loss.correction.reject", loss.correction.reject, "off"),
            ("loss.correction.veto", loss.correction.veto, "off"),
            ("rounds.filter_zero_variance", rounds.filter_zero_variance, False),
            ("prompts.truncated_responses", prompts.truncated_responses, "zero"),
        ):
            if got != wanted:
                raise ValueError(f"loss.name={SUPERVISED} requires {name}={wanted}, got {got}")
        for name, source in sources.items():
            if source.environment:
                raise ValueError(
                    f"loss.name={SUPERVISED} takes rows of a file or a task, got {name}.environment="
                    f"{source.environment}. "
                    "Write its episodes as conversations into a file, and set prompts.path"
                )
