"""Config sections of the schedule: rounds, ticket admission and weight publishing."""

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
    SecondsOrZero,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionConfig(CheckedSection):
    """Admission: the tickets that may be in service concurrently."""

    policy: Literal["fifo", "frontier", "window"] = "fifo"
    """Tickets that may start sampling. `fifo`: all open tickets. `frontier`: the `width` unfinished groups that were
    issued first (RolloutPipe eq. 5-6). `window`: so many that `sequences` are in progress; a finished one is replaced
    immediately (PipelineRL Algorithm 2)."""
    width: Count | Literal["auto"] = "auto"
    """Groups in service, summed over all actors. `auto` with fifo: unlimited. `auto` with window: 4 eta_P U, or (1 +
    async_ratio) eta_P U if async_ratio is set. `auto` with frontier: unlimited in the first round and with
    environments. Later rounds have the fewest groups, at least U, with which the engines keep 97% of the speed that
    they measured (`learner/schedule/frontier_width.py`)."""
    sequences: CountOrZero = 0
    """Sequences H in service in a window, summed over all actors. With unit=group, each actor can exceed it by K - 1,
    because a whole group starts on one free slot. Sequences of unequal length start more than H / K groups and raise
    the lag; rounds.max_lag_steps and async_ratio bound it. 0: the sequences of `width` groups."""
    async_ratio: NotNegative | None = None
    """Async ratio alpha of a window, in updates (ROLL Flash section 4.3): at most (1 + alpha) U groups are issued and
    untrained. Samples that started more than alpha updates ago (rounded up) are aborted or rejected, and regenerated.
    With unit=sample, other samples of the group stay. Updates train the oldest groups first and wait for groups that
    would become too old. Alpha is rounded down if rounds.overprovision_prompts is above 1. U is
    rounds.groups_per_update. 0: synchronous. None: no bound."""
    unit: Literal["group", "sample"] = "group"
    """Unit that an actor claims. `group`: all samples of a prompt, computed once with actor.prefix_caching. `sample`:
    single samples, so that one prompt can use several engines (queue scheduling and prompt replication of ROLL
    Flash)."""
    when_full: Literal["block", "drop_oldest"] = "block"
    """Policy when `queue_groups` complete groups are waiting in a window. `block`: issue one ticket per trained group
    (backpressure on the actors). `drop_oldest`: discard the oldest group and regenerate it with newer weights
    (PipelineRL's ring buffer)."""
    queue_groups: CountOrZero = 0
    """Complete groups that can wait in a window before `when_full` applies. With `block`, groups already issued (in
    service plus a backlog of U) can still arrive. 0: U (rounds.groups_per_update) without async_ratio, else the
    number that async_ratio allows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.async_ratio is not None and self.policy != "window":
            raise ValueError(f"admission.async_ratio requires admission.policy=window, got {self.policy}")
        if self.when_full == "drop_oldest" and self.policy != "window":
            raise ValueError(
                f"admission.when_full=drop_oldest requires admission.policy=window (a round needs all of its groups), "
                f"got {self.policy}"
            )
        if self.width != "auto" and self.policy == "fifo":
            raise ValueError(
                f"admission.width ({self.width}) requires admission.policy=frontier or window, got fifo; leave it out"
            )
        for name in ("sequences", "queue_groups"):
            if getattr(self, name) and self.policy != "window":
                raise ValueError(f"admission.{name} requires admission.policy=window, got {self.policy}; leave it out")
        if self.sequences and self.width != "auto":
            raise ValueError(
                f"admission.sequences ({self.sequences}) and admission.width ({self.width}) both set the size of a "
                "window. Leave one out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishConfig(CheckedSection):
    """Publishing of weights to the engines and their handling of running requests."""

    when: Literal["round_end", "every"] = "round_end"
    """Time of a publish. `round_end`: at the end of each round. `every`: every `every_n_steps` updates, during
    generation."""
    every_n_steps: Count = 1
    """Updates between two publishes, for when=every."""
    at_publish: Literal["keep", "abort_and_resume", "drain"] = "keep"
    """Handling of running requests at a weight update. `keep`: continue under the new weights (in-flight updates,
    PipelineRL). `abort_and_resume`: abort, and resume from the sampled tokens as new requests (partial rollouts, ROLL
    Flash). `drain`: finish before the update, without starting new requests."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """KV cache of running requests at a weight update, for at_publish=keep (PipelineRL section 5.1). `keep`: reuse keys
    and values of older weights. `recompute`: compute them again with the new weights."""
    lora: Literal["merged", "adapter"] = "merged"
    """Published weights with lora.rank > 0. `merged`: full weights with the adapters merged. `adapter`: only the
    adapters, served by vLLM on the base weights; with at_publish=keep a request finishes under the adapter it started
    with."""
    probe_every_n_publishes: CountOrZero = 10
    """Publishes between two parity probes. A probe compares the engine's logprobs of new samples with the learner's
    before the next update. 0: never."""
    parity_bound: NotNegative = 0.0
    """Tolerance of a parity probe: largest |dlogprob| in nats. 0: 1e-4 for served_dtype=float32, 0.25 for bfloat16."""
    snapshot_dir: LocalPath = ""
    """Folder of the run's snapshots. Empty: shared memory (/dev/shm)."""
    when_late: Literal["wait", "replace"] = "wait"
    """Policy when a publish is still in progress as the next is due. `wait`: block the learner. `replace`: keep
    training and publish only the newest version. Counted in `publish/late` and `publish/replaced`."""
    serve: Literal["none", "http", "https"] = "none"
    """Server of snapshots for other machines. `none`: off. `http`: loopback addresses only. `https`: any address."""
    listen: str = "127.0.0.1:0"
    """Address and port of the snapshot server. Each of several learner processes serves its own rows; {process_id} is
    its number. Port 0: any free port."""
    advertise: str = ""
    """URL under which actors reach the snapshot server, for example https://learner.example:8443. With several learner
    processes, it must contain {process_id} or {host} (the machine name). Empty: the listen address."""
    slow_reader_grace_s: SecondsOrZero = 600.0
    """Time that one superseded version stays available for slow readers, in seconds, in addition to 10 s for any
    version. Set it above the transfer time of a version over the slowest link. The learner uses a third snapshot slot
    on demand (shared memory of the model's served bytes) and does not wait. 0: off; slow readers receive no weights
    while newer versions arrive."""
    bucket: LocalPath = ""
    """Bucket URL (s3://..., gs://... or file:///...) that also receives published versions. Uploads do not block
    training. During an upload only the newest due version is queued, as a copy in learner memory. Empty: none."""
    full_every: Count = 20
    """Interval, in versions, of versions that other machines can only download in full. The versions between are also
    offered as deltas against the previous version. 1: no deltas."""

    @property
    def leaves_the_machine(self) -> bool:
        """True if other machines fetch published versions."""
        return self.serve != "none" or bool(self.bucket)

    @property
    def has_spare_slot(self) -> bool:
        """True if the learner can use a third snapshot slot for slow readers."""
        return self.serve != "none" and self.slow_reader_grace_s > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket and not self.bucket.startswith(("s3://", "gs://", "file:///")):
            raise ValueError(f"publish.bucket must be s3://..., gs://... or file:///..., got {self.bucket!r}")
        if self.every_n_steps > 1 and self.when != "every":
            raise ValueError(
                f"publish.every_n_steps ({self.every_n_steps}) requires publish.when=every, got {self.when}; leave it "
                "out"
            )
        if self.kv_cache == "recompute" and self.at_publish != "keep":
            raise ValueError(
                f"publish.kv_cache=recompute has no effect with publish.at_publish={self.at_publish}; leave it out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsConfig(CheckedSection):
    """Rounds of R groups of K samples, with U groups per update (RolloutPipe section 3)."""

    groups_per_round: Count = 32
    """Groups R per round; a group is the responses to one prompt. With publish.when=every, R only numbers the
    rounds."""
    samples_per_group: Count = 8
    """Samples K per group: responses to one prompt. 1 requires loss.advantage=gae or none."""
    groups_per_update: Count = 8
    """Groups U = B / K per update."""
    epochs: Count = 1
    """Epochs E over the batch of an update, with one optimizer step per epoch (PPO). The first epoch trains groups as
    they arrive. Later epochs repeat its micro-batches from host memory: 34 bytes per slot of a packed row, plus 4 bytes
    per additional policy in the loss. Versions, lags and step counts advance by one per update. The optimizer's fields
    count optimizer steps."""
    train_start: Literal["round_complete", "group_ready"] = "group_ready"
    """Start of training on a round. `round_complete`: after all R groups are complete. `group_ready`: as each group
    arrives (CGP)."""
    max_lag_steps: CountOrZero | None = None
    """Upper bound on the lag of a group's oldest token, in updates. A window issues few enough groups for it. Updates
    train the oldest groups first and wait for groups that would exceed it, so a slow response delays updates. Groups
    over the bound, for example after a restart with a smaller bound, are dropped, counted and issued again. None: no
    bound."""
    overprovision_prompts: Annotated[float, Range(1, 4)] = 1.0
    """Overprovisioning factor eta_P of prompts (RollPacker section 3, tail batching). A short round issues eta_P R
    prompts and keeps the first R complete groups. Prompts of the others form a long round of R. A window issues
    speculative batches of eta_P U tickets and keeps the first U groups (`learner/schedule/tail_batching.py`). 1:
    off."""
    overprovision_samples: Annotated[float, Range(1, 4)] = 1.0
    """Overprovisioning factor eta_R of samples: eta_R K responses or episodes start and the first K to finish are kept,
    except in long rounds. 1: off."""
    filter_zero_variance: bool = False
    """True if groups with equal rewards, which have no learning signal, are dropped. Another prompt replaces each in
    the same round. False: they are trained."""
    ess_floor: FractionOrZero = 0.0
    """Smallest effective sample size, as a fraction, at which an update is applied, measured in its first epoch. Below
    it, the learner waits for a full batch sampled with its current weights (PipelineRL, NeurIPS version, Algorithm 2).
    0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups_per_round % self.groups_per_update:
            raise ValueError(
                f"rounds.groups_per_update (U={self.groups_per_update}) must divide rounds.groups_per_round "
                f"(R={self.groups_per_round})"
            )
        if self.ess_floor == 1:
            raise ValueError("rounds.ess_floor must be below 1, because no off-policy update reaches 1, got 1")

    @property
    def groups_issued(self) -> int:
        """Prompts per short round: eta_P R, rounded up."""
        return math.ceil(self.overprovision_prompts * self.groups_per_round - 1e-9)

    @property
    def groups_per_race(self) -> int:
        """Prompts per speculative batch of a window, of which U are kept: eta_P U, rounded up."""
        return math.ceil(self.overprovision_prompts * self.groups_per_update - 1e-9)

    @property
    def requests_per_group(self) -> int:
        """Responses sampled per group of a short round: eta_R K, rounded up."""
        return math.ceil(self.overprovision_samples * self.samples_per_group - 1e-9)
