"""When weights go out, and what running requests do then."""

import dataclasses
from typing import Literal

from configs.checks import not_negative, positive


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
        positive("publish", every_n_steps=self.every_n_steps)
        not_negative("publish", probe_every_n_publishes=self.probe_every_n_publishes, parity_bound=self.parity_bound)
        if self.kv_cache == "recompute" and self.at_publish != "keep":
            raise ValueError(
                f"publish.kv_cache=recompute has no effect with publish.at_publish={self.at_publish}; leave it out"
            )
