"""Config section of the correction between the engine's policy and the learner's.

The equations are in learner/update/corrections.py.
"""

import dataclasses
from typing import Literal

from configs.sections.base import NotNegative, Positive, check_ranges, check_unread

Level = Literal["off", "token", "turn", "turn_mean", "sequence", "sequence_mean"]
"""Tokens whose ratios make one ratio. `turn` and `sequence` are products, `_mean` is their geometric mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Correction for the difference between the engine's policy mu and the learner's, in addition to the loss.

    A ratio is pi / mu, of a token or of the tokens of a turn or a sequence. Setting a field that another one disables
    raises ValueError.
    """

    policy: Literal["proximal", "current"] = "proximal"
    """Policy pi of the ratios. `proximal`: pi_prox of loss.proximal, so ratios are constant over rounds.epochs.
    `current`: the trained policy."""
    weight: Level = "off"
    """Ratio that each token's policy loss is multiplied by, without a gradient. `token`: its own. `turn`: product over
    its turn. `turn_mean`: geometric mean over its turn. `sequence`, `sequence_mean`: over its response. `off`: no
    weight. Requires loss.name of reinforce, ppo_clip or a custom loss, because other losses have a ratio to mu."""
    min_weight: NotNegative = 0.0
    """Lower bound of the weight. 0: no lower bound."""
    max_weight: Positive = 2.0
    """Upper bound of the weight."""
    outside: Literal["truncate", "mask"] = "truncate"
    """Weight of a ratio outside min_weight and max_weight. `truncate`: the nearest bound. `mask`: 0, and the token
    still counts in the normalization."""
    reject: Level = "off"
    """Ratio outside of whose bounds min_ratio and max_ratio tokens are not trained: of a `token`, a `turn` or a
    `sequence` (product), `turn_mean` or `sequence_mean` (geometric mean). Rejected tokens count in no normalization, as
    if they were observed. `off`: no rejection."""
    min_ratio: NotNegative = 0.5
    """Lower bound of the ratio of loss.correction.reject. 0: no lower bound."""
    max_ratio: Positive = 2.0
    """Upper bound of the ratio of loss.correction.reject."""
    veto: Literal["off", "sequence", "group"] = "off"
    """Tokens that are rejected with a token whose own ratio is below veto_ratio. `sequence`: its response. `group`: all
    responses to its prompt, which requires packing.whole_groups. `off`: no veto."""
    veto_ratio: Positive = 1e-4
    """Lower bound of the ratio of each token of a response or group, for loss.correction.veto."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number outside its range, empty bounds, or a field that has no effect."""
        check_ranges("loss.correction", self)
        for is_on, reader, names in (
            (self.is_on, "weight, reject or veto", ("policy",)),
            (self.weight != "off", "weight", ("min_weight", "max_weight", "outside")),
            (self.reject != "off", "reject", ("min_ratio", "max_ratio")),
            (self.veto != "off", "veto", ("veto_ratio",)),
        ):
            if not is_on:
                why = f"without loss.correction.{reader}; set that or leave it out"
                check_unread("loss.correction", self, why, names)
        for least, most in (("min_weight", "max_weight"), ("min_ratio", "max_ratio")):
            low, high = getattr(self, least), getattr(self, most)
            if low >= high:
                raise ValueError(
                    f"loss.correction.{least} must be below loss.correction.{most}, got {low:g} and {high:g}"
                )

    @property
    def is_on(self) -> bool:
        """True if there is a weight, a rejection or a veto."""
        return self.rejects or self.weight != "off"

    @property
    def rejects(self) -> bool:
        """True if tokens can be rejected."""
        return self.reject != "off" or self.veto != "off"

    @property
    def effective(self) -> dict[str, float | str]:
        """Fields that have an effect, by name; empty if the correction is off."""
        if not self.is_on:
            return {}
        used: dict[str, float | str] = {"policy": self.policy}
        if self.weight != "off":
            bounds = {"min_weight": self.min_weight, "max_weight": self.max_weight}
            used |= {"weight": self.weight, **bounds, "outside": self.outside}
        if self.reject != "off":
            used |= {"reject": self.reject, "min_ratio": self.min_ratio, "max_ratio": self.max_ratio}
        if self.veto != "off":
            used |= {"veto": self.veto, "veto_ratio": self.veto_ratio}
        return used
