"""The objective's section of the configuration: which loss, its constants, and what else is in the objective.

The equations are in learner/objective/losses.py, learner/objective/losses.py, learner/objective/advantages.py,
learner/objective/advantages.py and learner/objective/reward_shaping.py.
"""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from configs import custom_functions
from configs.sections.base import (
    CheckedSection,
    CountOrZero,
    Fraction,
    FractionOrZero,
    LocalPath,
    NotNegative,
    Positive,
)

LOSS_CONSTANTS: dict[str, dict[str, float | None]] = {
    "grpo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "truncated_is": {"max_weight": 5.0},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "max_weight": 5.0},
    "tis": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "max_weight": 2.0},
    "masked_is": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "min_weight": 0.5, "max_weight": 2.0},
    "cispo": {"clip_low": 0.1, "clip_high": 0.1},
    "topr": {"min_weight": 0.0, "max_weight": 1.0},
}
"""By loss: the constants it reads, each with what public systems ship (None: off). The equations are in
learner/objective/losses.py. CISPO's are ROLL Flash's; MiniMax-M1 sets clip_low=1 (no lower bound) and tunes
clip_high."""

Normalization = Literal["token", "sequence", "sequence_sum", "constant"]

PROXIMAL_LOSSES = ("decoupled_ppo", "tis", "masked_is")
"""The losses that tell pi_prox from mu."""

NORMALIZATIONS: dict[str, Normalization] = {"gspo": "sequence", "dr_grpo": "constant"}
"""By loss: the normalisation that is its own, where it isn't token."""
DECOUPLED_LOSSES = ("decoupled_ppo", "tis")
"""Those of them that are truncated_is, bit for bit, where pi_prox is the policy itself at every gradient."""

Proximal = Literal["batch", "round", "published"]

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "mean_baseline", "turn_grpo")
_STANDARDIZED = ("grpo", "turn_grpo")
"""Those that divide by a standard deviation."""

CUSTOM_LOSS = custom_functions.Signature(
    takes=("logprobs", "inputs"),
    constants=("clip_low", "clip_high", "dual_clip", "min_weight", "max_weight"),
    returns="(loss, clipped)",
)
"""A user's own loss: like those of learner/objective/losses.py, with the constants of `LossConfig` that it takes."""
OPTIONAL_INPUTS = ("proximal_logprobs", "sequence_log_ratio")
"""Fields of a loss's inputs that are computed on request: a user's own loss names them in an attribute `needs`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(CheckedSection):
    """The objective: advantages, the per-token loss, its penalties, and how token losses are averaged.

    A constant left at None has the chosen loss's own default (`LOSS_CONSTANTS`). One that the chosen loss does not
    read is refused: it would change nothing, in silence.
    """

    name: str = "grpo_clip"
    """One of `LOSS_CONSTANTS`, or `module:function` of the user's own, which reads those constants that it takes by
    name.

    dapo and dr_grpo are grpo_clip with the rest of their papers held fast: dapo wants advantage=grpo,
    normalization=token, the overlong penalty and rounds.filter_zero_variance (its dynamic sampling), dr_grpo
    advantage=dr_grpo and normalization=constant. gspo wants normalization=sequence: averaged otherwise its gradient is
    not that of its objective."""
    clip_low: FractionOrZero | None = None
    """e_low: ratios are clipped to [1 - e_low, 1 + e_high]; 1 is no lower bound."""
    clip_high: NotNegative | None = None
    dual_clip: NotNegative | None = None
    """c > 1 of dual-clip PPO: where A < 0 the ratio counts as c at most. None is off; 3 is common."""
    min_weight: NotNegative | None = None
    """Lower end of masked_is' and topr's weights."""
    max_weight: Positive | None = None
    """c of truncated importance sampling (PipelineRL eq. 5), the cap on rho, or the weights' upper end."""
    proximal: Proximal = "batch"
    """pi_prox of decoupled_ppo, tis and masked_is: from where the clip bounds how far the policy goes. batch: the
    weights that an update's batch is first trained by; the first pass over it scores its tokens, the later ones
    (rounds.epochs) compare with that. round, with publish.when=round_end: the weights at the round's start, and
    published, with publish.when=every: those last published; both are kept, a copy in the compute dtype, and score
    each token once. Of decoupled_ppo and tis a combination that makes one optimizer step for each pi_prox is
    refused: it is truncated_is."""
    advantage: str = "grpo"
    """One of `ADVANTAGE_NAMES` (dr_grpo and mean_baseline are one equation by its two names), or `module:function` of
    the user's own, like those of learner/objective/advantages.py. All but turn_grpo credit every sampled token of a
    response with its whole reward; turn_grpo credits those of a turn with the return from that turn on, compared with
    those of all turns of the group."""
    advantage_eps: Positive = 1e-6
    """Added to the standard deviation of advantage=grpo and turn_grpo (RolloutPipe eq. 1)."""
    advantage_std: Literal["sample", "population"] = "sample"
    """The standard deviation of advantage=grpo: over K - 1 (torch's default, so that of the public codes) or over K. No
    paper's equation says which. Of turn_grpo the same over the group's turns."""
    turn_discount: Fraction = 1.0
    """gamma of advantage=turn_grpo, in (0, 1]: what a reward one turn later counts."""
    normalization: Normalization | None = None
    """What the sum over the update's tokens is divided by. token: by the tokens (DAPO eq. 12); sequence: each
    sequence's by its own tokens, then by the sequences (GRPO, DeepSeekMath eq. 3; GSPO eq. 5); sequence_sum: by the
    sequences (PipelineRL eq. 5); constant: by the sequences times sampling.max_response_tokens (Dr.GRPO). None is the
    loss's own: sequence for gspo, constant for dr_grpo, token for the others."""
    entropy_coef: NotNegative = 0.0
    """Times the entropy, taken off every token's loss; a bonus, so not below 0."""
    kl_coef: NotNegative = 0.0
    """Times the KL estimate against the reference, added to every token's loss; 0 runs without a reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r, with r = pi_theta / pi_ref (Schulman's note)."""
    reference_path: LocalPath = ""
    """Hugging Face folder of the reference; empty: the weights that the run started from."""
    overlong_buffer_tokens: CountOrZero | None = None
    """DAPO's soft overlong punishment: over the last so many tokens before sampling.max_response_tokens the reward
    falls linearly by overlong_penalty. 0 is off; None is 4096 for dapo and off for the others. An episode's sampled
    tokens count, not its observed ones."""
    overlong_penalty: Positive = 1.0
    length_penalty: NotNegative = 0.0
    """Times Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), added to the reward: from 0.5 for the shortest
    response of the group to -0.5 for the longest, in sampled tokens; a wrong response (reward 0 or less) never gains by
    it. 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        custom_functions.check_name("loss.name", self.name, LOSS_CONSTANTS)
        custom_functions.check_name("loss.advantage", self.advantage, ADVANTAGE_NAMES)
        if self.proximal not in (policies := get_args(Proximal)):
            raise ValueError(f"loss.proximal wants one of {', '.join(policies)}, got {self.proximal!r}")
        self._refuse_unread()
        self._check_constants()
        self._check_whole_method()

    def _check_constants(self) -> None:
        # Which of them a user's own loss reads is known once it is imported; here it is not.
        constants = self._given if custom_functions.is_custom(self.name) else self.constants
        if constants.get("dual_clip", 2.0) <= 1:
            raise ValueError(f"loss.dual_clip must be > 1 (it bounds a ratio from above), got {self.dual_clip}")
        least, most = constants.get("min_weight", 0.0), constants.get("max_weight", math.inf)
        if not 0 <= least < most:
            raise ValueError(f"want 0 <= loss.min_weight < loss.max_weight, got {least} and {most}")

    def _check_whole_method(self) -> None:
        if self.name == "dapo" and self.overlong_tokens == 0:
            raise ValueError(
                "loss.name=dapo includes the overlong penalty, got loss.overlong_buffer_tokens=0; without it take "
                "loss.name=grpo_clip and loss.clip_high=0.28"
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
                    f"loss.name={self.name} is the whole method and wants {whole}, got loss.{field}={got}; set what it "
                    "wants, or take loss.name=grpo_clip for another combination"
                )

    def _refuse_unread_constants(self, read: dict[str, Any]) -> None:
        for name, value in self._given.items():
            if name not in read:
                raise ValueError(
                    f"loss.{name}={value} has no effect with loss.name={self.name}, which reads "
                    f"{', '.join(read) or 'none'}; leave it out (None)"
                )

    def _refuse_unread(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        standardized = f"loss.advantage={' or '.join(_STANDARDIZED)}"
        # What a user's own loss reads is known once it is imported (`optional_inputs`).
        may_be_proximal = self.name in PROXIMAL_LOSSES or custom_functions.is_custom(self.name)
        for name, is_read, reader in (
            ("proximal", may_be_proximal, f"loss.name of {', '.join(PROXIMAL_LOSSES)}"),
            ("advantage_eps", self.advantage in _STANDARDIZED, standardized),
            ("advantage_std", self.advantage in _STANDARDIZED, standardized),
            ("turn_discount", self.advantage == "turn_grpo", "loss.advantage=turn_grpo"),
            ("kl_estimator", self.kl_coef > 0, "loss.kl_coef > 0"),
            ("reference_path", self.kl_coef > 0, "loss.kl_coef > 0"),
            ("overlong_penalty", self.overlong_tokens > 0, "loss.overlong_buffer_tokens > 0"),
        ):
            value = getattr(self, name)
            if not is_read and value != defaults[name]:
                raise ValueError(f"loss.{name}={value} has no effect without {reader}; set that or leave it out")

    @property
    def constants(self) -> dict[str, float]:
        """The constants that the chosen loss reads, defaults filled in; what is off is left out.

        Raises:
          ValueError: of a user's own loss: it can't be loaded, one is given that it does not read, or none is given
            that it has no default for.
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
    def optional_inputs(self) -> frozenset[str]:
        """Members of `OPTIONAL_INPUTS` that the chosen loss reads.

        Raises:
          ValueError: a user's own loss can't be loaded or names another input, or loss.proximal is set and not read.
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
        if "proximal_logprobs" not in read and self.proximal != "batch":
            raise ValueError(
                f"loss.proximal={self.proximal} has no effect with loss.name={self.name}, which does not name "
                "proximal_logprobs in its attribute `needs`; add it or leave loss.proximal out"
            )
        return read

    @property
    def given_clips(self) -> dict[str, float]:
        """The constants of the clip that were given; they need pi_theta / pi_prox to leave 1."""
        return {name: value for name, value in self._given.items() if "clip" in name}

    @property
    def _given(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in CUSTOM_LOSS.constants}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def _read(self) -> dict[str, Any]:
        """By constant: its default."""
        if custom_functions.is_custom(self.name):
            return custom_functions.constant_defaults(
                custom_functions.load("loss.name", self.name, CUSTOM_LOSS), CUSTOM_LOSS
            )
        return LOSS_CONSTANTS[self.name]

    @property
    def normalized_by(self) -> Normalization:
        """The normalisation with the loss's own filled in."""
        return self.normalization or NORMALIZATIONS.get(self.name, "token")

    @property
    def overlong_tokens(self) -> int:
        """The buffer of the overlong penalty with the default filled in; 0 is off."""
        default = 4096 if self.name == "dapo" else 0
        return default if self.overlong_buffer_tokens is None else self.overlong_buffer_tokens
