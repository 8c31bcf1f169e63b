"""What an engine can do: measured once, and the simulated engine's only input."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """What an engine can do."""

    running: tuple[float, ...]
    """Numbers of running sequences that the throughput was measured at, rising."""
    tokens_per_s: tuple[float, ...]
    """All sequences together, at each of them. Linear between, through (0, 0) before, constant after."""
    max_num_seqs: int
    kv_capacity_tokens: int = 0
    """Prompt and response tokens of all running sequences; 0 for no bound."""
    kv_watermark: float = 0.0
    """Share of the cache that stays free when a waiting request starts beside others (vLLM's `watermark`; 0 too)."""
    prefill_s_per_token: float = 0.0
    request_s: float = 0.0
    """What a request costs whatever its length: being taken in, scheduled, handed back. Nothing is decoded meanwhile.
    A request that was ended for new weights and goes on as another one costs it again."""
    start_latency_s: float = 0.0
    """From a request's start in the engine to its first token, on top of its prompt and of `request_s`."""

    def __post_init__(self) -> None:
        """Checks the table and the bounds."""
        if not self.running or len(self.running) != len(self.tokens_per_s):
            raise ValueError(
                "engine.running and engine.tokens_per_s must be lists of one length, at least 1; "
                f"got {len(self.running)} and {len(self.tokens_per_s)}"
            )
        if any(b <= a for a, b in zip((0, *self.running), self.running, strict=False)):
            raise ValueError(f"engine.running must be > 0 and rise, got {list(self.running)}")
        if any(not 0 < t < math.inf for t in self.tokens_per_s):
            raise ValueError(f"engine.tokens_per_s must be finite and > 0, got {list(self.tokens_per_s)}")
        if self.max_num_seqs < 1:
            raise ValueError(f"engine.max_num_seqs must be >= 1, got {self.max_num_seqs}")
        if not 0 <= self.kv_watermark < 1:
            raise ValueError(f"engine.kv_watermark must be in [0, 1), got {self.kv_watermark}")
        for name in ("kv_capacity_tokens", "prefill_s_per_token", "request_s", "start_latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"engine.{name} must be finite and >= 0, got {getattr(self, name)}")

    def throughput(self, num_running: float) -> float:
        """Returns the tokens/s of all sequences together when so many run."""
        return float(np.interp(min(num_running, self.max_num_seqs), (0.0, *self.running), (0.0, *self.tokens_per_s)))

    def speeds(self) -> list[float]:
        """Tokens/s of one sequence when h run, for h = 0 .. max_num_seqs; 0 for none."""
        h = np.arange(1, self.max_num_seqs + 1)
        total = np.interp(h, (0.0, *self.running), (0.0, *self.tokens_per_s))
        return [0.0, *(total / h).tolist()]
