"""The sections that say how a run is scheduled: rounds, admission, publishing (DESIGN.md section 4)."""

import dataclasses
import math
from typing import Literal

from configs.checks import not_negative, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """Rounds of R groups of K samples, U groups an optimizer step (RolloutPipe, section 3)."""

    groups_per_round: int = 32
    """R. With publish.when=every, R only numbers the rounds."""
    samples_per_group: int = 8
    """K."""
    groups_per_update: int = 8
    """U = B / K."""
    train_start: Literal["round_complete", "group_ready"] = "group_ready"
    """When training on a round may begin: all R groups there, or each as it arrives (CGP)."""
    max_lag_steps: int | None = None
    """Hard bound on the lag of a group's oldest token. A window is kept narrow enough for it, and groups over it
    when they are dequeued are dropped, counted and issued again. A response that takes longer than so many steps can
    never be trained."""
    overprovision_prompts: float = 1.0
    """eta_P of RollPacker's tail batching (section 3): a short round issues eta_P R prompts and keeps the first R
    groups to complete; the others' prompts wait until R of them make a long round of their own. 1: off."""
    overprovision_samples: float = 1.0
    """eta_R: eta_R K responses are sampled and the first K to end are kept (not in long rounds). 1: off."""
    filter_zero_variance: bool = False
    """Groups whose rewards are all equal teach nothing; they are dropped, and another prompt takes the place of each
    in the same round."""
    ess_floor: float = 0.0
    """An update whose effective sample size is below it isn't made: the learner waits until a full batch by its own
    current weights is there (PipelineRL, NeurIPS version, Algorithm 2). 0: off."""

    def __post_init__(self) -> None:
        """Checks this section."""
        if self.samples_per_group < 2:
            raise ValueError(
                f"rounds.samples_per_group (K) must be >= 2 (an advantage compares a group's members), "
                f"got {self.samples_per_group}"
            )
        positive("rounds", groups_per_round=self.groups_per_round, groups_per_update=self.groups_per_update)
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
    def requests_per_group(self) -> int:
        """Responses sampled for a group of a short round: eta_R K, rounded up."""
        return math.ceil(self.overprovision_samples * self.samples_per_group - 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Which tickets an actor has in service at once."""

    policy: Literal["fifo", "frontier", "window"] = "fifo"
    """fifo: all that are open; frontier: the `width` lowest orders (RolloutPipe eq. 5-6); window: `width`
    groups kept in progress, issued as others are consumed (PipelineRL Algorithm 2, H = width K)."""
    width: int = 0
    """Groups, of all actors together; 0 means U for frontier, and for window 4 U or what async_ratio asks for."""
    async_ratio: float | None = None
    """alpha of ROLL Flash (section 4.3), for a window: tickets are issued for the update being filled and alpha more,
    so at most (1 + alpha) U groups are issued and not yet trained; 0 waits for each update's weights. Groups trained in
    the order of their tickets have a lag of at most alpha, rounded up; one that others overtake, more
    (`rounds.max_lag_steps`)."""
    unit: Literal["group", "sample"] = "group"
    """What an actor claims: whole groups (with actor.prefix_caching their prompt is computed once), or single samples,
    so that the K samples of a prompt spread over several engines (ROLL Flash's queue scheduling and prompt
    replication)."""
    when_full: Literal["block", "drop_oldest"] = "block"
    """What complete groups do that wait for a slower learner: hold their place in the window, so that the actors
    pause, or give way, the oldest first, to be generated anew by newer weights (PipelineRL's ring buffer)."""
    queue_groups: int = 0
    """With drop_oldest: complete groups that may wait; 0 means U."""

    def __post_init__(self) -> None:
        """Checks this section."""
        not_negative("admission", width=self.width, async_ratio=self.async_ratio, queue_groups=self.queue_groups)
        if self.async_ratio is not None and self.policy != "window":
            raise ValueError(f"admission.async_ratio needs admission.policy=window, got {self.policy}")
        if self.when_full == "drop_oldest" and self.policy != "window":
            raise ValueError(
                f"admission.when_full=drop_oldest needs admission.policy=window (a round wants each of its groups), "
                f"got {self.policy}"
            )
        if self.queue_groups and self.when_full == "block":
            raise ValueError("admission.queue_groups has no effect with admission.when_full=block; leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishConfig:
    """When new weights go to the engines, and what happens to running requests then."""

    when: Literal["round_end", "every"] = "round_end"
    every_n_steps: int = 1
    """With when=every."""
    at_publish: Literal["keep", "abort_and_resume", "drain"] = "keep"
    """What running requests do: go on under the new weights (in flight, PipelineRL), end and go on from their tokens as
    new requests (partial rollouts, ROLL Flash), or finish first while nothing new starts."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """With at_publish=keep: what running requests do with the keys and values of older weights (PipelineRL section
    5.1)."""
    probe_every_n_publishes: int = 10
    """After every n-th publish the learner compares the engine's logprobs of fresh samples with its own
    before the next step; 0 never."""
    parity_bound: float = 0.0
    """Largest |dlogprob| a probe may show; 0 means 1e-4 for float32 and 0.25 for bfloat16."""
    snapshot_dir: str = ""
    """Folder in which the run keeps its snapshots; empty: shared memory."""

    def __post_init__(self) -> None:
        """Checks this section."""
        positive("publish", every_n_steps=self.every_n_steps)
        not_negative("publish", probe_every_n_publishes=self.probe_every_n_publishes, parity_bound=self.parity_bound)
        if self.kv_cache == "recompute" and self.at_publish != "keep":
            raise ValueError(
                f"publish.kv_cache=recompute has no effect with publish.at_publish={self.at_publish}; leave it out"
            )
