"""Rounds, admission, publish: the paper's knobs."""

import dataclasses
import math
from typing import Annotated, Literal

from configs.sections.base import (
    CheckedSection,
    Count,
    CountOrZero,
    FractionOrZero,
    LocalPath,
    NotNegative,
    Range,
    Seconds,
    SecondsOrZero,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionConfig(CheckedSection):
    """Which tickets an actor has in service at once."""

    policy: Literal["fifo", "frontier", "window"] = "fifo"
    """fifo: all that are open; frontier: the `width` lowest orders (RolloutPipe eq. 5-6); window: H sequences kept in
    progress, as one ends the next begins (PipelineRL Algorithm 2)."""
    width: CountOrZero = 0
    """Groups, of all actors together; 0 means U for frontier, and for window 4 eta_P U or what async_ratio asks for."""
    sequences: CountOrZero = 0
    """H: sequences of a window in service at once, on all actors together; 0 means those of `width` groups. With
    unit=group up to K - 1 more an actor: a whole group begins as soon as one place is free. A group's lag is what it
    takes to generate it: with H sequences of unequal lengths more than H / K groups are begun, and those that others
    overtake train late. What bounds it are `rounds.max_lag_steps` and `async_ratio`."""
    async_ratio: NotNegative | None = None
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
    queue_groups: CountOrZero = 0
    """Complete groups of a window that may wait for the learner before `when_full` applies; 0 means U, or what
    async_ratio allows. With block as many again as were issued just then may come to wait, since all of that ends: the
    sequences' groups and a backlog of U."""

    def __post_init__(self) -> None:
        super().__post_init__()
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


DEFAULT_MAX_ADAPTERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishConfig(CheckedSection):
    """When new weights go to the engines, and what happens to running requests then."""

    when: Literal["round_end", "every"] = "round_end"
    """When new weights go out: at the end of a round, or every `every_n_steps` updates, while responses go on."""
    every_n_steps: Count = 1
    """With when=every."""
    at_publish: Literal["keep", "abort_and_resume", "drain"] = "keep"
    """What running requests do: go on under the new weights (in flight, PipelineRL), end and go on from their tokens as
    new requests (partial rollouts, ROLL Flash), or finish first while nothing new starts."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """With at_publish=keep: what running requests do with the keys and values of older weights (PipelineRL section
    5.1)."""
    lora: Literal["merged", "adapter"] = "merged"
    """With lora.rank: what goes out. Whole weights with the adapters added to them, or the adapters alone, which vLLM
    serves beside the base; then a request ends under the adapter that it began with (at_publish=keep)."""
    max_adapters: Count = DEFAULT_MAX_ADAPTERS
    """With lora=adapter: how many an engine holds. Where requests still use that many, those of the oldest end at a
    publish and go on from their tokens under the new one."""
    probe_every_n_publishes: CountOrZero = 10
    """After every n-th publish the learner compares the engine's logprobs of fresh samples with its own
    before the next step; 0 never."""
    parity_bound: NotNegative = 0.0
    """Largest |dlogprob| a probe may show; 0 means 1e-4 for float32 and 0.25 for bfloat16."""
    snapshot_dir: LocalPath = ""
    """Folder in which the run keeps its snapshots; empty: shared memory."""
    when_late: Literal["wait", "replace"] = "wait"
    """When a publish is not out before the next is due: the learner waits for it, or goes on and, of those that are
    due meanwhile, only the newest goes out. Both are counted."""
    serve: Literal["none", "http", "https"] = "none"
    """Whether snapshots are served to other machines; http on loopback only."""
    listen: str = "127.0.0.1:0"
    """Address and port that they are served at; port 0 takes a free one. Of several learner processes each serves its
    own rows; {process_id} is its number."""
    advertise: str = ""
    """URL under which actors reach it (https://learner.example:8443); empty: the address it listens at. With several
    learner processes it has {process_id} or {host}, the machine's name, in it: https://{host}:8443."""
    max_connections: Count = 256
    """Connections that each learner host serves weights over at once. A reader has 4 connections, spread over up to
    four learner hosts; with more hosts it has one to each, to at most 16. On Kubernetes each actor is a reader,
    elsewhere each actor host."""
    reader_grace_s: Seconds = 10.0
    """How long a version that was superseded is served on to who has begun to read it."""
    slow_reader_grace_s: SecondsOrZero = 600.0
    """How long one version is served on besides, to readers slower than versions come: without it they get none while
    newer ones come. Give more than a version takes over the slowest link. The learner does not wait for it, but takes a
    third slot as soon as one is needed: once more the model's served bytes of shared memory. 0: never."""
    bucket: LocalPath = ""
    """s3://..., gs://... or file:///... into which versions are put besides; empty: none. Nobody waits for it: of
    versions that are due while another is on its way there, the newest goes. That one is copied in the learner's memory
    until it is there."""
    bucket_keep: Count = 2
    """Versions that stay there."""
    bucket_wait_s: Seconds = 600.0
    """How long the end of a run waits for its last version to be there."""
    full_every: Count = 20
    """Every n-th version goes to other machines in full only, those between also as deltas against the one before; 1:
    all in full, no deltas."""

    @property
    def leaves_the_machine(self) -> bool:
        """Whether versions are fetched from other machines."""
        return self.serve != "none" or bool(self.bucket)

    @property
    def has_spare_slot(self) -> bool:
        """Whether the learner may take a third slot, so that one version can be kept for slow readers."""
        return self.serve != "none" and self.slow_reader_grace_s > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket and not self.bucket.startswith(("s3://", "gs://", "file:///")):
            raise ValueError(f"publish.bucket must be s3://..., gs://... or file:///..., got {self.bucket!r}")
        if self.lora != "adapter" and self.max_adapters != DEFAULT_MAX_ADAPTERS:
            raise ValueError(
                f"publish.max_adapters={self.max_adapters} has no effect with publish.lora={self.lora}; leave it out, "
                "or take publish.lora=adapter"
            )
        if self.kv_cache == "recompute" and self.at_publish != "keep":
            raise ValueError(
                f"publish.kv_cache=recompute has no effect with publish.at_publish={self.at_publish}; leave it out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsConfig(CheckedSection):
    """Rounds of R groups of K samples, U groups an optimizer step (RolloutPipe, section 3)."""

    groups_per_round: Count = 32
    """R: prompts, of a group of responses each, in a round. With publish.when=every, R only numbers the rounds."""
    samples_per_group: Count = 8
    """K: responses to a prompt."""
    groups_per_update: Count = 8
    """U = B / K: groups behind one update."""
    epochs: Count = 1
    """E: passes over each update's batch of U groups, an optimizer step each (PPO's epochs). The first takes groups as
    they arrive; the later ones repeat its micro-batches, which wait in host memory until then (29 bytes a place of a
    packed row, and 4 more for each policy that the loss compares with). Versions, lags, rounds and whatever counts
    updates or steps, but for the optimizer's own fields, go on by one an update, whatever E."""
    train_start: Literal["round_complete", "group_ready"] = "group_ready"
    """When training on a round may begin: all R groups there, or each as it arrives (CGP)."""
    max_lag_steps: CountOrZero | None = None
    """Hard bound on the lag of a group's oldest token, in steps. A window is kept narrow enough for it, and trains from
    the oldest groups on: an update waits for groups that would be over the bound after it, so a slow response delays
    updates. Groups over it all the same, as after a restart with a smaller bound, are dropped, counted and issued
    again."""
    overprovision_prompts: Annotated[float, Range(1, 4)] = 1.0
    """eta_P of RollPacker's tail batching (section 3): a short round issues eta_P R prompts and keeps the first R
    groups to complete; the others' prompts wait until R of them make a long round of their own. In a window the same of
    U: heats of eta_P U tickets, of which the first U groups win (`learner/schedule/tail_batching.py`). 1: off."""
    overprovision_samples: Annotated[float, Range(1, 4)] = 1.0
    """eta_R: eta_R K responses or episodes are sampled, the first K to end are kept (not in long rounds). 1: off."""
    filter_zero_variance: bool = False
    """Groups whose rewards are all equal teach nothing; they are dropped, and another prompt takes the place of each
    in the same round."""
    ess_floor: FractionOrZero = 0.0
    """An update whose effective sample size, at its first pass, is below it isn't made: the learner waits until a full
    batch by its own current weights is there (PipelineRL, NeurIPS version, Algorithm 2). 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_group < 2:
            raise ValueError(
                f"rounds.samples_per_group (K) must be >= 2 (an advantage compares a group's members), "
                f"got {self.samples_per_group}"
            )
        if self.groups_per_round % self.groups_per_update:
            raise ValueError(
                f"rounds.groups_per_update (U={self.groups_per_update}) must divide "
                f"rounds.groups_per_round (R={self.groups_per_round})"
            )
        if self.ess_floor == 1:
            raise ValueError("rounds.ess_floor must be below 1, got 1: no update off policy reaches it")

    @property
    def groups_issued(self) -> int:
        """Prompts of a short round: eta_P R, rounded up."""
        return math.ceil(self.overprovision_prompts * self.groups_per_round - 1e-9)

    @property
    def groups_per_race(self) -> int:
        """Prompts of which an update of a window keeps U: eta_P U, rounded up."""
        return math.ceil(self.overprovision_prompts * self.groups_per_update - 1e-9)

    @property
    def requests_per_group(self) -> int:
        """Responses sampled for a group of a short round: eta_R K, rounded up."""
        return math.ceil(self.overprovision_samples * self.samples_per_group - 1e-9)
