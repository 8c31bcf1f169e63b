"""Config section of the critic, which estimates values for loss.advantage=gae."""

import dataclasses
from typing import Literal

from configs.sections.base import CheckedSection, Fraction, FractionOrZero, LocalPath, Positive, check_unread
from configs.sections.loss import LossConfig
from configs.sections.model import HelpersConfig
from configs.sections.schedule import RoundsConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig(CheckedSection):
    """Critic: a value head, trained on the same micro-batches as the policy (PPO).

    Its fields have an effect only with loss.advantage=gae. Its optimizer, precisions, mesh and recomputation are the
    policy's, except for the learning rate. The defaults of `discount` and `gae_lambda` are PipelineRL's eq. 4: A = R -
    V.
    """

    backbone: Literal["own", "policy"] = "own"
    """Model whose last hidden states the head reads. `own`: a second model, which the value loss trains; it takes the
    memory of a model with optimizer state. `policy`: the policy, which the value loss does not change; it takes
    little memory, and a forward pass per micro-batch. A head alone learns with a larger learning_rate, about 1e-3."""
    path: LocalPath = ""
    """Hugging Face folder of the critic's initial model, which must have the policy's tokenizer and may have another
    size. Its output head is replaced by a value head of zeros. Empty: model.path."""
    learning_rate: Positive = 1e-5
    """Peak learning rate of the critic, with the warm-up and schedule of the policy."""
    gae_lambda: FractionOrZero = 1.0
    """Factor lambda of generalized advantage estimation (Schulman et al., 2016). 1: returns without bias from the
    critic. 0: one-step temporal differences."""
    discount: Fraction = 1.0
    """Discount gamma per action, in (0, 1]. 1: no discount."""
    level: Literal["token", "turn"] = "token"
    """Action of which the critic estimates the value. `token`: each sampled token. `turn`: each turn of an episode, a
    run of sampled tokens; all tokens of a turn have its advantage, and only its start trains the critic. Observed
    tokens are context and no actions in both."""
    value_clip: Positive | None = None
    """Distance from the value before the update beyond which a value has no gradient (PPO2); requires rounds.epochs >
    1. With backbone=policy, the policy's update moves values too. None: off."""

    def check_beside(self, loss: LossConfig, rounds: RoundsConfig, helpers: HelpersConfig) -> None:
        """Raises ValueError for a field that has no effect, and for sections that do not fit a critic or its lack."""
        if not loss.uses_critic:
            if loss.reads_rewards and rounds.samples_per_group < 2:
                raise ValueError(
                    "rounds.samples_per_group (K) must be >= 2 (an advantage compares a group's members), got "
                    f"{rounds.samples_per_group}. Raise it, or train a critic with loss.advantage=gae"
                )
            check_unread("critic", self, "without loss.advantage=gae; set that or leave it out")
            return
        if self.backbone == "policy" and self.path:
            raise ValueError(
                f"critic.path={self.path} has no effect with critic.backbone=policy; leave it out, or set "
                "critic.backbone=own"
            )
        if loss.correction.rejects:
            raise ValueError(
                "loss.correction.reject and veto require an advantage of the group, got loss.advantage=gae: the critic "
                "would learn from rejected tokens. Use loss.correction.weight"
            )
        if rounds.filter_zero_variance:
            raise ValueError(
                "rounds.filter_zero_variance has no effect with loss.advantage=gae, where equal rewards have a "
                "learning signal; set it to False"
            )
        if rounds.samples_per_group == 1 and loss.length_penalty:
            raise ValueError(
                f"loss.length_penalty={loss.length_penalty} has no effect with rounds.samples_per_group=1, because it "
                "compares the lengths of a group. Set it to 0, or raise rounds.samples_per_group"
            )
        if self.value_clip is not None and rounds.epochs == 1:
            raise ValueError(
                f"critic.value_clip={self.value_clip} has no effect with rounds.epochs=1, where each value is that "
                "before the update. Leave it out (None), or set rounds.epochs=2"
            )
        if helpers.num_engines:
            raise ValueError(
                "helpers.num_engines requires another loss.advantage than gae, because a helper has no critic. Set "
                "helpers.num_engines=0"
            )
