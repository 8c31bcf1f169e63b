"""What is in service at once."""

import dataclasses
from typing import Literal

from configs.checks import not_negative


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
