"""Elastic tensor parallel size: RollPacker's parallelism planner (sections 4.2, 4.4). Pure: no engine, no clock.

`actor.elastic_control` applies its decisions. Each decision uses one step's preemptions, KV usage and lengths:

* Tensor parallel size (section 4.2). It doubles when preemptions exceed 1.05 times those of the previous step of the
  same kind by more than chance explains (the paper has only the factor). It also doubles when the step's lengths,
  simulated once more (`played_out_peak`), nearly fill the KV cache: slowly growing responses are then caught before
  they preempt. It halves after four steps without preemptions. A change costs a restart. So it halves only if the
  smaller KV cache would hold the projected peak (section 4.4), and a change discards all earlier observations.
* Concurrent sequences (`Admission.max_sequences`), at no cost. They decrease only if the engine does not grow and
  responses were preempted at least once on average. A preemption repeats a prefill, many times faster than decoding,
  whereas a removed slot never decodes.

Only comparable steps are compared. A step is a round, as in the paper, however few of its responses this engine served.
Long rounds preempt less than short ones, so each round is compared with the last of its kind. Engines share a round
unevenly, so preemptions are counted per response.
"""

import dataclasses
import heapq
import math

import numpy as np
from jaxtyping import Int32

from actor.engine_protocol import EngineSize

RISE = 1.05
"""Ratio of preemptions to the previous step above which the engine grows (section 4.2)."""
NUM_DEVIATIONS = 4.0
"""Standard deviations by which the rise must exceed chance. Shrinking again takes quiet steps, so one false alarm per
run is too many: at 2, one step in 40 is a false alarm, at 4 one in 30,000."""
NUM_QUIET_STEPS = 4
"""Steps without preemptions after which the engine may shrink (section 4.2)."""
HEADROOM = 0.9
"""Fraction of the KV cache that a projected peak may fill."""
LOW_USAGE = 0.8
"""Peak KV usage below which more sequences may run, in [0, 1]."""
REFILLS = 3
"""Refills of each window slot when lengths are simulated."""
LOWER, RAISE = 0.8, 1.25
"""Factors by which the number of concurrent sequences changes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Load of one step: a round, or in a window enough responses followed by new weights."""

    num_preempted: int
    num_finished: int = 1
    """Responses that finished, at least 1. Preemptions are compared per response."""
    kv_usage_peak: float
    """Peak KV cache usage, in [0, 1]."""
    is_full: bool
    """True if all allowed slots were in use, so that requests waited."""
    lengths: Int32[np.ndarray, "N 2"]
    """Prompt and response tokens of the last responses; may be empty."""
    is_race: bool = False
    """True if more requests than samples were started: a short round of tail batching."""

    def preempts_more_than(self, before: "StepStats") -> bool:
        """Returns True if preemptions per response rose by more than RISE and beyond sampling noise.

        The paper has only the factor (section 4.2), which small counts exceed every second step at a steady load.
        Counts a and b over n and m responses at one rate are Poisson: the standard deviation of a m - b n is sqrt((a +
        b) n m).
        """
        a, n, b, m = self.num_preempted, self.num_finished, before.num_preempted, before.num_finished
        return a * m > RISE * b * n and a * m - b * n > NUM_DEVIATIONS * math.sqrt((a + b) * n * m)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticDecision:
    """Engine size to use from now on."""

    max_sequences: int
    tensor_parallel_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBounds:
    """Limits of a decision."""

    min_sequences: int
    max_sequences: int
    """Sequences that the engine was built for."""
    min_tensor_parallel_size: int = 1
    max_tensor_parallel_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_sequences <= self.max_sequences:
            raise ValueError(
                f"expected 1 <= min_sequences <= max_sequences, got {self.min_sequences} and {self.max_sequences}"
            )
        if not 1 <= self.min_tensor_parallel_size <= self.max_tensor_parallel_size:
            raise ValueError(
                "expected 1 <= min_tensor_parallel_size <= max_tensor_parallel_size, got "
                f"{self.min_tensor_parallel_size} and {self.max_tensor_parallel_size}"
            )


@dataclasses.dataclass(slots=True, kw_only=True)
class ElasticPolicy:
    """State of the parallelism planner."""

    size: EngineSize
    bounds: ElasticBounds
    max_sequences: int
    tensor_parallel_size: int
    by_round: bool = True
    """True if each weights version is a round and so a step (publish.when=round_end). In a window one version covers
    too few responses: a step ends with the first new version after `max_sequences` responses."""
    last_of_kind: dict[bool, StepStats] = dataclasses.field(default_factory=dict)
    """Last step with a race and last without; cleared on a size change, which makes steps incomparable."""
    num_quiet_steps: int = 0

    def is_whole(self, num_finished: int) -> bool:
        """Returns True if this many responses complete a step, given that new weights arrived."""
        return num_finished >= (1 if self.by_round else self.max_sequences)

    def observe(self, step: StepStats) -> ElasticDecision:
        """Records a step and returns the size for the following ones."""
        size = self._next_size(step)
        if size <= self.tensor_parallel_size:  # a larger engine provides the capacity that fewer sequences would
            self.max_sequences = self._next_sequences(step)
        self.tensor_parallel_size = size
        return ElasticDecision(max_sequences=self.max_sequences, tensor_parallel_size=self.tensor_parallel_size)

    def _next_size(self, step: StepStats) -> int:
        now, before = self.tensor_parallel_size, self.last_of_kind.get(step.is_race)
        self.last_of_kind[step.is_race] = step
        self.num_quiet_steps = 0 if step.num_preempted else self.num_quiet_steps + 1
        new = now
        rises = before is not None and step.preempts_more_than(before)
        if rises or not self._holds(step):
            new = now * 2
        elif self.num_quiet_steps >= NUM_QUIET_STEPS and now % 2 == 0 and self._fits(step, now // 2):
            new = now // 2
        if new == now or not self.bounds.min_tensor_parallel_size <= new <= self.bounds.max_tensor_parallel_size:
            return now
        self.last_of_kind, self.num_quiet_steps = {}, 0
        return new

    def _next_sequences(self, step: StepStats) -> int:
        now = self.max_sequences
        fitting = num_fitting(step.lengths, HEADROOM * kv_tokens_at(self.size, self.size.tensor_parallel_size))
        if step.num_preempted >= step.num_finished:
            # The projection may see no need, yet something must change; halve at most.
            new = max(now // 2, min(int(LOWER * now), fitting))
        elif not step.num_preempted and step.is_full and step.kv_usage_peak < LOW_USAGE:
            new = max(now, min(math.ceil(RAISE * now), fitting))
        else:
            new = now
        return max(self.bounds.min_sequences, min(new, self.bounds.max_sequences))

    def _holds(self, step: StepStats) -> bool:
        """Returns True if the KV cache would hold the step again, or if no lengths are known."""
        if not len(step.lengths):
            return True
        # In a window new sequences replace finished ones, so its slots never empty together.
        num_requests = step.num_finished + (0 if self.by_round else REFILLS * self.max_sequences)
        peak = played_out_peak(step.lengths, num_requests=num_requests, places=self.max_sequences)
        return peak <= HEADROOM * kv_tokens_at(self.size, self.tensor_parallel_size)

    def _fits(self, step: StepStats, size: int) -> bool:
        if not len(step.lengths):
            return False
        return num_fitting(step.lengths, HEADROOM * kv_tokens_at(self.size, size)) >= self.max_sequences


def peak_kv_tokens(lengths: Int32[np.ndarray, "N 2"]) -> float:
    """Returns the peak KV cache per sequence, averaged over many concurrent sequences, in tokens.

    With prompts p and responses r, it is the larger of two cases:

    * All start together and none is replaced, max_t mean((p + t) [r >= t]): the peak is just before one finishes.
    * Each finished sequence is replaced, sum(r (p + r / 2)) / sum(r): at any moment a slot holds a sequence with
      probability proportional to its length, on average half done.

    Raises:
      ValueError: `lengths` is empty.
    """
    if not len(lengths):
        raise ValueError("expected at least one length, got none")
    prompts, responses = lengths[np.argsort(lengths[:, 1])].T.astype(np.float64)
    num_left = np.arange(len(lengths), 0, -1)
    together = (prompts[::-1].cumsum()[::-1] + num_left * responses).max() / len(lengths)
    if not responses.sum():
        return float(together)
    return float(max(together, (responses * (prompts + responses / 2)).sum() / responses.sum()))


def played_out_peak(lengths: Int32[np.ndarray, "N 2"], *, num_requests: int, places: int) -> int:
    """Returns the peak KV cache of simulated requests with these lengths, in tokens.

    All sequences decode one token at a time. Each finished sequence is replaced until the requests run out.

    Args:
      lengths: prompt and response tokens, repeated or truncated to `num_requests`.
      num_requests: responses of the step.
      places: concurrent sequences.
    """
    running: list[tuple[int, int]] = []
    """Heap of (finish time, tokens held by then)."""
    held = now = peak = 0
    for prompt, response in np.resize(lengths, (num_requests, 2)).tolist():
        if len(running) == places:
            end, _ = running[0]
            held += len(running) * (end - now)
            now, peak = end, max(peak, held)
            while running and running[0][0] == now:
                held -= heapq.heappop(running)[1]
        heapq.heappush(running, (now + response, prompt + response))
        held += prompt
    while running:
        end, size = heapq.heappop(running)
        held += (len(running) + 1) * (end - now)
        now, peak = end, max(peak, held)
        held -= size
    return peak


def num_fitting(lengths: Int32[np.ndarray, "N 2"], kv_tokens: float) -> int:
    """Returns how many sequences fit by projected peak; 2**31 - 1 while no lengths are known."""
    if not len(lengths):
        return 2**31 - 1
    return int(max(0.0, kv_tokens) / max(peak_kv_tokens(lengths), 1.0))


def kv_tokens_at(size: EngineSize, tensor_parallel_size: int) -> float:
    """Returns the KV capacity at another tensor parallel size, in tokens.

    With memory m per device and weights w, both in tokens of KV cache, t m = kv(t) + w.
    """
    total = size.kv_tokens + size.weights_kv_tokens
    return total * tensor_parallel_size / size.tensor_parallel_size - size.weights_kv_tokens
