"""Elastic tensor parallel size: RollPacker's parallelism planner (section 4.2). Pure: no engine, no clock.

A step is full if its KV cache was: a response was preempted, or the peak usage reached `FULL`. The size doubles once
full steps since the engine's start have taken as long as a restart. It halves after at least `NUM_QUIET_STEPS` steps in
a row whose peak would fill at most `FITS` of the KV cache at half the size, if they took as long as a restart together.

The paper's rule compares preemptions with the previous step's. It cannot see steady preemptions, doubles by chance when
they vary, and halves into a cache that is too small (`tests/bench/parallelism`).
"""

import dataclasses

from actor.engine_protocol import EngineSize

FULL = 0.95
"""Peak KV usage from which a step is full, in [0, 1]. Requests that wait for memory leave a little of it free."""
FITS = 0.9
"""Fraction of the smaller KV cache that the peak may fill when the size halves. Below `FULL`, so that it stays halved.
"""
NUM_QUIET_STEPS = 4
"""Steps in a row after which the size may halve (section 4.2)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """KV cache load of one step: a round, or in a window enough responses followed by new weights."""

    seconds: float
    kv_usage_peak: float
    """Peak KV cache usage, in [0, 1]."""
    num_preempted: int

    @property
    def is_full(self) -> bool:
        """True if the KV cache limited the step."""
        return self.num_preempted > 0 or self.kv_usage_peak >= FULL


@dataclasses.dataclass(slots=True, kw_only=True)
class ElasticPolicy:
    """State of the parallelism planner since the engine's start."""

    size: EngineSize
    max_tensor_parallel_size: int
    restart_s: float
    """Cost of a change, in seconds."""
    full_s: float = 0.0
    """Seconds of full steps."""
    num_quiet_steps: int = 0
    """Last steps in a row that half the size would have held."""
    quiet_s: float = 0.0
    """Seconds of these steps."""

    by_round: bool = True
    """True if each weights version is a round and so a step (publish.when=round_end). In a window one version covers
    too few responses: a step ends with the first new version after a full engine of responses."""

    def is_whole(self, num_finished: int) -> bool:
        """Returns True if this many responses complete a step, given that new weights arrived."""
        return num_finished >= (1 if self.by_round else self.size.max_num_seqs)

    def next_size(self, step: StepStats) -> int:
        """Records a step and returns the tensor parallel size to use from now on."""
        now = self.size.tensor_parallel_size
        if step.is_full:
            self.full_s += step.seconds
        if self._fits_half(step):
            self.num_quiet_steps, self.quiet_s = self.num_quiet_steps + 1, self.quiet_s + step.seconds
        else:
            self.num_quiet_steps, self.quiet_s = 0, 0.0
        if step.is_full and self.full_s >= self.restart_s and 2 * now <= self.max_tensor_parallel_size:
            return 2 * now
        if self.num_quiet_steps >= NUM_QUIET_STEPS and self.quiet_s >= self.restart_s:
            return now // 2
        return now

    def _fits_half(self, step: StepStats) -> bool:
        now = self.size.tensor_parallel_size
        if step.is_full or now % 2:
            return False
        return step.kv_usage_peak * self.size.kv_tokens <= FITS * kv_tokens_at(self.size, now // 2)


def kv_tokens_at(size: EngineSize, tensor_parallel_size: int) -> float:
    """Returns the KV capacity at another tensor parallel size, in tokens.

    With memory m per device and weights w, both in tokens of KV cache, t m = kv(t) + w.
    """
    total = size.kv_tokens + size.weights_kv_tokens
    return total * tensor_parallel_size / size.tensor_parallel_size - size.weights_kv_tokens
