"""Rounds, updates, and what may be trained."""

import dataclasses
import math
from typing import Literal

from configs.checks import not_negative, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """Rounds of R groups of K samples, U groups an optimizer step (RolloutPipe, section 3)."""

    groups_per_round: int = 32
    """R: prompts, of a group of responses each, in a round. With publish.when=every, R only numbers the rounds."""
    samples_per_group: int = 8
    """K: responses to a prompt."""
    groups_per_update: int = 8
    """U = B / K: groups behind one update."""
    epochs: int = 1
    """E: passes over each update's batch of U groups, an optimizer step each (PPO's epochs). The first takes groups as
    they arrive; the later ones repeat its micro-batches, which wait in host memory until then (29 bytes a place of a
    packed row, and 4 more for each policy that the loss compares with). Versions, lags, rounds and whatever counts
    updates or steps, but for the optimizer's own fields, go on by one an update, whatever E."""
    train_start: Literal["round_complete", "group_ready"] = "group_ready"
    """When training on a round may begin: all R groups there, or each as it arrives (CGP)."""
    max_lag_steps: int | None = None
    """Hard bound on the lag of a group's oldest token, in steps. A window is kept narrow enough for it, and trains from
    the oldest groups on: an update waits for groups that would be over the bound after it, so a slow response delays
    updates. Groups over it all the same, as after a restart with a smaller bound, are dropped, counted and issued
    again."""
    overprovision_prompts: float = 1.0
    """eta_P of RollPacker's tail batching (section 3): a short round issues eta_P R prompts and keeps the first R
    groups to complete; the others' prompts wait until R of them make a long round of their own. In a window the same of
    U: heats of eta_P U tickets, of which the first U groups win (`learner/schedule/heats.py`). 1: off."""
    overprovision_samples: float = 1.0
    """eta_R: eta_R K responses or episodes are sampled, the first K to end are kept (not in long rounds). 1: off."""
    filter_zero_variance: bool = False
    """Groups whose rewards are all equal teach nothing; they are dropped, and another prompt takes the place of each
    in the same round."""
    ess_floor: float = 0.0
    """An update whose effective sample size, at its first pass, is below it isn't made: the learner waits until a full
    batch by its own current weights is there (PipelineRL, NeurIPS version, Algorithm 2). 0: off."""

    def __post_init__(self) -> None:
        if self.samples_per_group < 2:
            raise ValueError(
                f"rounds.samples_per_group (K) must be >= 2 (an advantage compares a group's members), "
                f"got {self.samples_per_group}"
            )
        positive(
            "rounds",
            groups_per_round=self.groups_per_round,
            groups_per_update=self.groups_per_update,
            epochs=self.epochs,
        )
        if self.groups_per_round % self.groups_per_update:
            raise ValueError(
                f"rounds.groups_per_update (U={self.groups_per_update}) must divide "
                f"rounds.groups_per_round (R={self.groups_per_round})"
            )
        not_negative("rounds", max_lag_steps=self.max_lag_steps)
        for name in ("overprovision_prompts", "overprovision_samples"):
            if not 1 <= getattr(self, name) <= 4:
                raise ValueError(f"rounds.{name} must be between 1 (off) and 4, got {getattr(self, name)}")
        if not 0 <= self.ess_floor < 1:
            raise ValueError(f"rounds.ess_floor must be in [0, 1), got {self.ess_floor}")

    @property
    def groups_issued(self) -> int:
        """Prompts of a short round: eta_P R, rounded up."""
        return math.ceil(self.overprovision_prompts * self.groups_per_round - 1e-9)

    @property
    def groups_per_heat(self) -> int:
        """Prompts of which an update of a window keeps U: eta_P U, rounded up."""
        return math.ceil(self.overprovision_prompts * self.groups_per_update - 1e-9)

    @property
    def requests_per_group(self) -> int:
        """Responses sampled for a group of a short round: eta_R K, rounded up."""
        return math.ceil(self.overprovision_samples * self.samples_per_group - 1e-9)
