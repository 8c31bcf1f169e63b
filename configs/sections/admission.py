"""What is in service at once."""

import dataclasses
from typing import Literal

from configs.checks import not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Which tickets an actor has in service at once."""

    policy: Literal["fifo", "frontier", "window"] = "fifo"
    """fifo: all that are open; frontier: the `width` lowest orders (RolloutPipe eq. 5-6); window: H sequences kept in
    progress, as one ends the next begins (PipelineRL Algorithm 2)."""
    width: int = 0
    """Groups, of all actors together; 0 means U for frontier, and for window 4 eta_P U or what async_ratio asks for."""
    sequences: int = 0
    """H: sequences of a window in service at once, on all actors together; 0 means those of `width` groups. With
    unit=group up to K - 1 more an actor: a whole group begins as soon as one place is free. A group's lag is what it
    takes to generate it: with H sequences of unequal lengths more than H / K groups are begun, and those that others
    overtake train late. What bounds it are `rounds.max_lag_steps` and `async_ratio`."""
    async_ratio: float | None = None
    """alpha of ROLL Flash (section 4.3), for a window: tickets are issued for the update being filled and alpha more,
    so at most (1 + alpha) U groups are wanted and not yet trained; 0 waits for each update's weights. Redundant prompts
    (`rounds.overprovision_prompts`) are issued an update's at a time, so alpha is rounded down. Updates train from the
    oldest groups on and wait for those that would be too old after them. It is a bound per sample: one that began more
    than alpha updates (rounded up) ago is aborted, or not trained, and started anew; with unit=sample its siblings
    stay."""
    unit: Literal["group", "sample"] = "group"
    """What an actor claims: whole groups (with actor.prefix_caching their prompt is computed once), or single samples,
    so that the K samples of a prompt spread over several engines (ROLL Flash's queue scheduling and prompt
    replication)."""
    when_full: Literal["block", "drop_oldest"] = "block"
    """What happens in a window when `queue_groups` complete groups wait for a slower learner: one is issued for one
    that is trained, so that the actors come to wait, or the oldest give way, to be generated anew by newer weights
    (PipelineRL's ring buffer)."""
    queue_groups: int = 0
    """Complete groups of a window that may wait for the learner before `when_full` applies; 0 means U, or what
    async_ratio allows. With block as many again as were issued just then may come to wait, since all of that ends: the
    sequences' groups and a backlog of U."""

    def __post_init__(self) -> None:
        not_negative(
            "admission",
            width=self.width,
            sequences=self.sequences,
            async_ratio=self.async_ratio,
            queue_groups=self.queue_groups,
        )
        if self.async_ratio is not None and self.policy != "window":
            raise ValueError(f"admission.async_ratio needs admission.policy=window, got {self.policy}")
        if self.when_full == "drop_oldest" and self.policy != "window":
            raise ValueError(
                f"admission.when_full=drop_oldest needs admission.policy=window (a round wants each of its groups), "
                f"got {self.policy}"
            )
        for name in ("sequences", "queue_groups"):
            if getattr(self, name) and self.policy != "window":
                raise ValueError(f"admission.{name} needs admission.policy=window, got {self.policy}; leave it out")
        if self.sequences and self.width:
            raise ValueError(
                f"admission.sequences ({self.sequences}) and admission.width ({self.width}) both say what a window "
                "keeps in service; leave one out"
            )
