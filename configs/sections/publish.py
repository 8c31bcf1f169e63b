"""When weights go out, and what running requests do then."""

import dataclasses
from typing import Literal

from configs.checks import not_negative, positive

DEFAULT_MAX_ADAPTERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishConfig:
    """When new weights go to the engines, and what happens to running requests then."""

    when: Literal["round_end", "every"] = "round_end"
    """When new weights go out: at the end of a round, or every `every_n_steps` updates, while responses go on."""
    every_n_steps: int = 1
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
    max_adapters: int = DEFAULT_MAX_ADAPTERS
    """With lora=adapter: how many an engine holds. Where requests still use that many, those of the oldest end at a
    publish and go on from their tokens under the new one."""
    probe_every_n_publishes: int = 10
    """After every n-th publish the learner compares the engine's logprobs of fresh samples with its own
    before the next step; 0 never."""
    parity_bound: float = 0.0
    """Largest |dlogprob| a probe may show; 0 means 1e-4 for float32 and 0.25 for bfloat16."""
    snapshot_dir: str = ""
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
    max_connections: int = 256
    """Connections that each learner host serves weights over at once. A reader has 4 connections, spread over up to
    four learner hosts; with more hosts it has one to each, to at most 16. On Kubernetes each actor is a reader,
    elsewhere each actor host."""
    reader_wait_s: float = 10.0
    """How long a version that was superseded is served on to who has begun to read it."""
    slow_reader_s: float = 600.0
    """How long one version is served on besides, to readers slower than versions come: without it they get none while
    newer ones come. Give more than a version takes over the slowest link. The learner does not wait for it, but takes a
    third slot as soon as one is needed: once more the model's served bytes of shared memory. 0: never."""
    bucket: str = ""
    """s3://..., gs://... or file:///... into which versions are put besides; empty: none. Nobody waits for it: of
    versions that are due while another is on its way there, the newest goes. That one is copied in the learner's memory
    until it is there."""
    bucket_keep: int = 2
    """Versions that stay there."""
    bucket_wait_s: float = 600.0
    """How long the end of a run waits for its last version to be there."""
    full_every: int = 20
    """Every n-th version goes to other machines in full only, those between also as deltas against the one before; 1:
    all in full, no deltas."""

    @property
    def leaves_the_machine(self) -> bool:
        """Whether versions are fetched from other machines."""
        return self.serve != "none" or bool(self.bucket)

    @property
    def has_spare_slot(self) -> bool:
        """Whether the learner may take a third slot, so that one version can be kept for slow readers."""
        return self.serve != "none" and self.slow_reader_s > 0

    def __post_init__(self) -> None:
        positive(
            "publish",
            every_n_steps=self.every_n_steps,
            max_adapters=self.max_adapters,
            max_connections=self.max_connections,
            reader_wait_s=self.reader_wait_s,
            bucket_keep=self.bucket_keep,
            bucket_wait_s=self.bucket_wait_s,
            full_every=self.full_every,
        )
        not_negative("publish", slow_reader_s=self.slow_reader_s)
        not_negative("publish", probe_every_n_publishes=self.probe_every_n_publishes, parity_bound=self.parity_bound)
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
