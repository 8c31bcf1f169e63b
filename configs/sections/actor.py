"""The engine and the loop around it."""

import dataclasses

from configs.checks import not_negative, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The engine and the loop around it."""

    max_num_seqs: int = 64
    """Sequences the engine runs at once."""
    devices: str = ""
    """CUDA_VISIBLE_DEVICES of an actor that launch.local starts; empty leaves it as it is."""
    tensor_parallel_size: int = 1
    elastic: bool = False
    """Adapts how many sequences run at once, and restarts an engine whose preemptions ask for another tensor parallel
    size (RollPacker section 4.2); `actor/engine/elastic.py` says by which rules."""
    max_tensor_parallel_size: int = 0
    """With elastic: devices that one engine may take; 0 means tensor_parallel_size."""
    gpu_memory_utilization: float = 0.9
    """On a GPU."""
    kv_cache_gib: int = 1
    """On a CPU."""
    enforce_eager: bool = False
    prefix_caching: bool = False
    cpu_cores: str = ""
    """Cores the engine is pinned to on a CPU ("0" or "0-3"); empty leaves it to the engine."""
    lease_s: float = 30.0
    """A dead actor's tickets are offered again after this long."""
    verifier_timeout_s: float = 10.0
    verifier_retries: int = 2
    verifier_workers: int = 1
    """Processes that judge responses, off the event loop."""
    max_restarts: int = 5
    """How often in a row, without a new step in between, the supervisor starts a process again that died or hung."""
    start_timeout_s: float = 600.0
    """An engine that is not up by then has hung; its actor ends."""
    max_attempts: int = 3
    """How often a prompt is tried whose responses can't be judged; then another takes its place."""
    leave_s: float = 20.0
    """How long an actor that is told to end (SIGTERM) goes on with the groups it has; the rest it gives back. One that
    launch.local started ends at once, as the run has ended."""
    max_unstored_groups: int = 64
    """Groups that are sampled and not stored, from which on an actor begins nothing: the store is away, or slow, or its
    verifiers are."""

    def __post_init__(self) -> None:
        positive(
            "actor",
            max_num_seqs=self.max_num_seqs,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_gib=self.kv_cache_gib,
            lease_s=self.lease_s,
            verifier_timeout_s=self.verifier_timeout_s,
            verifier_workers=self.verifier_workers,
            start_timeout_s=self.start_timeout_s,
            max_attempts=self.max_attempts,
            max_unstored_groups=self.max_unstored_groups,
        )
        if 0 < self.max_tensor_parallel_size < self.tensor_parallel_size:
            raise ValueError(
                f"actor.max_tensor_parallel_size ({self.max_tensor_parallel_size}) is below "
                f"actor.tensor_parallel_size ({self.tensor_parallel_size})"
            )
        not_negative("actor", max_tensor_parallel_size=self.max_tensor_parallel_size)
        not_negative("actor", leave_s=self.leave_s)
        not_negative("actor", verifier_retries=self.verifier_retries, max_restarts=self.max_restarts)
