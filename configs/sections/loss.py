"""Config section of the objective: loss, advantage, penalties and normalization.

The equations are in learner/objective/losses.py, learner/objective/advantages.py and
learner/objective/reward_shaping.py.
"""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from configs import custom_functions
from configs.sections.base import (
    CountOrZero,
    Fraction,
    FractionOrZero,
    LocalPath,
    NotNegative,
    Positive,
    check_unread,
)
from configs.sections.correction import CorrectionConfig
from configs.sections.loss_table import (
    ADVANTAGE_NAMES,
    CUSTOM_LOSS,
    DECOUPLED_LOSSES,
    LOSS_CONSTANTS,
    NORMALIZATIONS,
    OPTIONAL_INPUTS,
    PROXIMAL_LOSSES,
    STANDARDIZED,
    SUPERVISED,
    UNCORRECTED_LOSSES,
    Normalization,
    Proximal,
)
from configs.sections.teacher import TeacherFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(TeacherFields):
    """Objective: advantage, per-token loss, penalties and averaging of token losses.

    Constants left at None take the default of the chosen loss (`LOSS_CONSTANTS`). Setting a constant that the loss does
    not read raises ValueError, because it would have no effect.
    """

    name: str = "grpo_clip"
    """Loss, one of `LOSS_CONSTANTS`, or `module:function` for a custom loss with any of the constants as keywords.

    dapo and dr_grpo are grpo_clip with the other settings of their papers required. dapo requires advantage=grpo,
    normalization=token, the overlong penalty and rounds.filter_zero_variance (dynamic sampling). dr_grpo requires
    advantage=dr_grpo and normalization=constant. gspo requires normalization=sequence, because its gradient is exact
    only with that average. sft is supervised fine-tuning, for launch.sft."""
    clip_low: FractionOrZero | None = None
    """Lower clip distance e_low: ratios are clipped to [1 - e_low, 1 + e_high]. 1: no lower bound. None: default of the
    loss."""
    clip_high: NotNegative | None = None
    """Upper clip distance e_high: ratios are clipped to [1 - e_low, 1 + e_high]. None: default of the loss."""
    dual_clip: NotNegative | None = None
    """Bound c > 1 of dual-clip PPO on the ratio of tokens with a negative advantage; 3 is common. None: off."""
    min_weight: NotNegative | None = None
    """Lower bound of the importance weights of masked_is and topr. None: default of the loss."""
    max_weight: Positive | None = None
    """Upper bound of importance weights: c of truncated importance sampling (PipelineRL eq. 5), or the cap on rho.
    None: default of the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    proximal: Proximal = "batch"
    """Proximal policy pi_prox of ppo_clip, decoupled_ppo, tis and masked_is, around which the ratio is clipped, and of
    loss.correction.policy=proximal. `batch`: weights before the first step on an update's batch; the first epoch scores
    its tokens and later ones (rounds.epochs) reuse the scores. `round`: weights at the start of the round, for
    publish.when=round_end. `published`: last published weights, for publish.when=every.

    `round` and `published` keep one copy of the weights in the compute dtype and score each token once. ppo_clip,
    decoupled_ppo and tis require more than one optimizer step per proximal policy, because they otherwise equal
    reinforce or truncated_is."""
    advantage: str = "grpo"
    """Advantage estimator, one of `ADVANTAGE_NAMES`, or `module:function` for a custom one. Both dr_grpo and
    mean_baseline name the same equation. turn_grpo credits the tokens of a turn with the return from that turn on,
    compared with all turns of the group. gae compares with the values of a critic instead (config section `critic`),
    so a group may have one response. `none` gives 0 to every token, for distillation alone (teacher_coef). All others
    credit every sampled token with the reward of its response."""
    advantage_eps: Positive = 1e-6
    """Constant added to the standard deviation of advantage=grpo and turn_grpo (RolloutPipe eq. 1)."""
    advantage_std: Literal["sample", "population"] = "sample"
    """Standard deviation of advantage=grpo over a group's responses, or of turn_grpo over its turns. `sample`: divide
    by K - 1 (torch's default, used by public code). `population`: divide by K. The papers do not specify it."""
    turn_discount: Fraction = 1.0
    """Discount gamma per turn of advantage=turn_grpo, in (0, 1]. 1: no discount."""
    normalization: Normalization | None = None
    """Denominator of the sum over the update's tokens. `token`: number of tokens (DAPO eq. 12). `sequence`: tokens of
    each sequence, then number of sequences (GRPO, DeepSeekMath eq. 3; GSPO eq. 5). `sequence_sum`: number of sequences
    (PipelineRL eq. 5). `constant`: number of sequences times sampling.max_response_tokens (Dr.GRPO). None: sequence for
    gspo, constant for dr_grpo, token otherwise."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus, subtracted from the loss of every token. 0: off."""
    kl_coef: NotNegative = 0.0
    """Coefficient of the KL estimate against the reference model, added to the loss of every token. 0: no reference
    model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator, with r = pi_theta / pi_ref (Schulman, "Approximating KL divergence"). `k1`: log r. `k2`: (log r)^2
    / 2. `k3`: 1/r - 1 + log r."""
    reference_path: LocalPath = ""
    """Hugging Face folder of the reference model. Empty: the initial weights of the run."""
    overlong_buffer_tokens: CountOrZero | None = None
    """Length of DAPO's soft overlong penalty, in tokens before sampling.max_response_tokens. The reward falls linearly
    by overlong_penalty over them. Episodes count sampled tokens only. 0: off. None: 4096 for dapo, off otherwise."""
    overlong_penalty: Positive = 1.0
    """Largest reward deduction of the overlong penalty, at sampling.max_response_tokens."""
    length_penalty: NotNegative = 0.0
    """Coefficient of Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), added to the reward. It ranges from
    0.5 for the shortest response of a group to -0.5 for the longest, in sampled tokens. Responses with a reward of at
    most 0 never gain from it. 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        custom_functions.check_name("loss.name", self.name, LOSS_CONSTANTS)
        custom_functions.check_name("loss.advantage", self.advantage, ADVANTAGE_NAMES)
        if self.proximal not in (policies := get_args(Proximal)):
            raise ValueError(f"loss.proximal: expected one of {', '.join(policies)}, got {self.proximal!r}")
        self._refuse_unread()
        self._check_constants()
        self._check_weight()
        self._check_whole_method()
        self._check_distillation()

    def _check_constants(self) -> None:
        # The constants of a custom loss are known only after its import, so check the given ones.
        constants = self._given if custom_functions.is_custom(self.name) else self.constants
        if constants.get("dual_clip", 2.0) <= 1:
            raise ValueError(f"loss.dual_clip must be > 1 (it bounds a ratio from above), got {self.dual_clip}")
        least, most = constants.get("min_weight", 0.0), constants.get("max_weight", math.inf)
        if not 0 <= least < most:
            raise ValueError(
                f"loss.min_weight: expected 0 <= loss.min_weight < loss.max_weight, got {least} and {most}"
            )

    def _check_weight(self) -> None:
        is_corrected = self.name not in UNCORRECTED_LOSSES and not custom_functions.is_custom(self.name)
        if is_corrected and self.correction.weight != "off":
            raise ValueError(
                f"loss.correction.weight={self.correction.weight} would correct loss.name={self.name} twice, because "
                f"it has a ratio to the engine's policy. Set loss.name={' or '.join(UNCORRECTED_LOSSES)}, or "
                "loss.correction.weight=off; loss.correction.reject and veto work with every loss"
            )

    def _check_whole_method(self) -> None:
        if self.name == "dapo" and self.overlong_tokens == 0:
            raise ValueError(
                "loss.name=dapo includes the overlong penalty, got loss.overlong_buffer_tokens=0; to train without "
                "it, set loss.name=grpo_clip and loss.clip_high=0.28"
            )
        wanted = {
            "dapo": {"advantage": ("grpo",), "normalization": ("token",), "length_penalty": (0.0,)},
            "dr_grpo": {"advantage": ("dr_grpo", "mean_baseline"), "normalization": ("constant",)},
            "gspo": {"normalization": ("sequence",)},
        }.get(self.name, {})
        for field, values in wanted.items():
            got = self.normalized_by if field == "normalization" else getattr(self, field)
            if got not in values:
                whole = " and ".join(f"loss.{f}={v[0]}" for f, v in wanted.items())
                raise ValueError(
                    f"loss.name={self.name} requires {whole}, got loss.{field}={got}. Set these values, or "
                    "loss.name=grpo_clip for another combination"
                )

    def _check_distillation(self) -> None:
        if self.advantage == "none" and not self.teacher_coef:
            raise ValueError(
                "loss.advantage=none leaves nothing to learn from without distillation; set loss.teacher_coef and "
                "a teacher (loss.teacher_path), or another advantage"
            )

    def _refuse_unread_constants(self, read: dict[str, Any]) -> None:
        for name, value in self._given.items():
            if name not in read:
                raise ValueError(
                    f"loss.{name}={value} has no effect with loss.name={self.name}, which reads "
                    f"{', '.join(read) or 'none'}; leave it out (None)"
                )

    def _refuse_unread(self) -> None:
        standardized = f"loss.advantage={' or '.join(STANDARDIZED)}"
        # The inputs of a custom loss are known only after its import (`optional_inputs`).
        may_be_proximal = (
            self.name in PROXIMAL_LOSSES or custom_functions.is_custom(self.name) or self.corrects_by_proximal
        )
        for name, is_read, reader in (
            ("proximal", may_be_proximal, f"loss.name of {', '.join(PROXIMAL_LOSSES)} or loss.correction"),
            ("advantage_eps", self.advantage in STANDARDIZED, standardized),
            ("advantage_std", self.advantage in STANDARDIZED, standardized),
            ("turn_discount", self.advantage == "turn_grpo", "loss.advantage=turn_grpo"),
            ("kl_estimator", self.kl_coef > 0, "loss.kl_coef > 0"),
            ("reference_path", self.kl_coef > 0, "loss.kl_coef > 0"),
            ("teacher_path", self.teacher_coef > 0, "loss.teacher_coef > 0"),
            ("teacher_url", self.teacher_coef > 0, "loss.teacher_coef > 0"),
            ("teacher_divergence", self.teacher_coef > 0, "loss.teacher_coef > 0"),
            ("teacher_top_k", self.compares_distributions, "loss.teacher_divergence=reverse_kl or forward_kl"),
            ("overlong_penalty", self.overlong_tokens > 0, "loss.overlong_buffer_tokens > 0"),
            *(
                (name, self.reads_rewards, "an advantage of the rewards (loss.advantage)")
                for name in ("overlong_buffer_tokens", "length_penalty")
            ),
            ("advantage", not self.is_supervised, "a loss of reinforcement learning (loss.name)"),
        ):
            if not is_read:
                check_unread("loss", self, f"without {reader}; set that or leave it out", (name,))

    def check_proximal(self, *, publish_when: str, steps_per_proximal: int) -> None:
        """Raises ValueError if pi_theta / pi_prox is 1 at every gradient, which makes the loss equal another."""
        by_window = publish_when == "every"
        refused, instead = ("round", "published") if by_window else ("published", "round")
        if self.proximal == refused:
            raise ValueError(
                f"loss.proximal={refused} requires publish.when={'round_end' if by_window else 'every'}, got "
                f"{publish_when}. Set loss.proximal={instead}, or batch with rounds.epochs=2"
            )
        if self.name not in PROXIMAL_LOSSES or steps_per_proximal > 1:
            return
        more = (
            "loss.proximal=published with publish.every_n_steps=2"
            if by_window
            else "loss.proximal=round with rounds.groups_per_update below rounds.groups_per_round"
        )
        why = (
            f"one optimizer step is made for each proximal policy (loss.proximal={self.proximal}, rounds.epochs=1), so "
            "pi_theta / pi_prox is 1 at every gradient"
        )
        if self.name == "ppo_clip":
            raise ValueError(
                f"loss.name=ppo_clip would have the gradient of loss.name=reinforce: {why}. Set that loss, "
                f"rounds.epochs=2, or {more}"
            )
        if self.name in DECOUPLED_LOSSES:
            raise ValueError(
                f"loss.name={self.name} would be loss.name=truncated_is with loss.max_weight="
                f"{self.constants['max_weight']:g}, bit for bit: {why}. Set that loss, rounds.epochs=2, or {more}"
            )
        for name, value in self.given_clips.items():
            raise ValueError(
                f"loss.{name}={value} has no effect: {why}. Leave it out (None), or set rounds.epochs=2, or {more}"
            )

    @property
    def reads_rewards(self) -> bool:
        """True if advantages are computed from rewards."""
        return not self.is_supervised and self.advantage != "none"

    @property
    def is_supervised(self) -> bool:
        """True for supervised fine-tuning."""
        return self.name == SUPERVISED

    @property
    def constants(self) -> dict[str, float]:
        """Constants that the chosen loss reads, with defaults filled in. Constants that are off (None) are omitted.

        Raises ValueError if the loss does not read a given constant, or a custom loss cannot be loaded or lacks a
        default for an unset constant.
        """
        read = self._read
        self._refuse_unread_constants(read)
        values: dict[str, float] = {}
        for name, default in read.items():
            value = self._given.get(name, default)
            if value is inspect.Parameter.empty:
                raise ValueError(f"loss.name={self.name} has no default for {name}; set loss.{name}")
            if value is not None:
                values[name] = float(value)
        return values

    @property
    def uses_critic(self) -> bool:
        """True if a critic is trained, whose values give the advantages."""
        return self.advantage == "gae"

    @property
    def optional_inputs(self) -> frozenset[str]:
        """Members of `OPTIONAL_INPUTS` that the chosen loss reads.

        Raises ValueError if a custom loss cannot be loaded or requests an unknown input, or loss.proximal is set but
        not read.
        """
        if not custom_functions.is_custom(self.name):
            read = {"proximal_logprobs": self.name in PROXIMAL_LOSSES, "sequence_log_ratio": self.name == "gspo"}
            return frozenset(name for name, is_read in read.items() if is_read)
        named: object = getattr(custom_functions.load("loss.name", self.name, CUSTOM_LOSS), "needs", ())
        names = cast("Sequence[object]", named) if isinstance(named, tuple | list) else (named,)
        read = frozenset(name for name in OPTIONAL_INPUTS if name in names)
        if len(read) != len(names):
            raise ValueError(
                f"loss.name={self.name}: its attribute `needs` must be a tuple of some of "
                f"{', '.join(OPTIONAL_INPUTS)}, got {named!r}"
            )
        if "proximal_logprobs" not in read and self.proximal != "batch" and not self.corrects_by_proximal:
            raise ValueError(
                f"loss.proximal={self.proximal} has no effect with loss.name={self.name}, which does not name "
                "proximal_logprobs in its attribute `needs`; add it or leave loss.proximal out"
            )
        return read

    @property
    def corrects_by_proximal(self) -> bool:
        """True if the correction reads the proximal policy."""
        return self.correction.is_on and self.correction.policy == "proximal"

    @property
    def given_clips(self) -> dict[str, float]:
        """Explicitly set clip constants. They have an effect only if pi_theta / pi_prox can differ from 1."""
        return {name: value for name, value in self._given.items() if "clip" in name}

    @property
    def _given(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in CUSTOM_LOSS.constants}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def _read(self) -> dict[str, Any]:
        if custom_functions.is_custom(self.name):
            return custom_functions.constant_defaults(
                custom_functions.load("loss.name", self.name, CUSTOM_LOSS), CUSTOM_LOSS
            )
        return LOSS_CONSTANTS[self.name]

    @property
    def normalized_by(self) -> Normalization:
        """Normalization with the default of the loss filled in."""
        return self.normalization or NORMALIZATIONS.get(self.name, "token")

    @property
    def frozen_folders(self) -> dict[str, str]:
        """Folders of the reference and the teachers, by config field."""
        reference = {"loss.reference_path": self.reference_path} if self.reference_path else {}
        return reference | dict(self.teacher_folders.values())

    @property
    def overlong_tokens(self) -> int:
        """Length of the overlong penalty in tokens, with the default filled in. 0: off."""
        default = 4096 if self.name == "dapo" else 0
        return default if self.overlong_buffer_tokens is None else self.overlong_buffer_tokens
