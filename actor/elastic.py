"""Elastic tensor parallel size: RollPacker's parallelism planner (sections 4.2, 4.4). Pure: no engine, no clock.

It decides the share of the devices that an engine takes; `actor.elastic_control` follows it.

From what a step showed (preemptions, KV usage, response lengths) two things are decided:

* the tensor parallel size (section 4.2): doubled when preemptions rise to more than 1.05 times those of the step
  before of the same kind, and by more than chance explains (the paper has the factor alone); and when the step's
  lengths, played out once more (`played_out_peak`), nearly fill the KV cache, so that responses which grow slowly are
  seen before they preempt. It is halved after four steps without preemptions. It costs a restart, so it is halved only
  if the KV cache that is left would hold the projected peak (the criterion of section 4.4 for giving devices away), and
  what was seen before a change counts for nothing after it;
* how many sequences run at once (`Admission.max_sequences`), at no cost: fewer only where the engine does not grow and
  each response was preempted once or more. A preempted response costs its prefill once more, which is many times
  faster than decoding; a place less decodes nothing at all times.

Only like is compared with like. A step is a round, as in the paper, however few responses of it this engine served; a
long round preempts less than the short ones around it, so each is held against the last of its kind; and of a round
that engines share each serves now more, now less, so preemptions are counted by response.
"""

import dataclasses
import heapq
import math

import numpy as np
from jaxtyping import Int32

from actor.engine_protocol import EngineSize

RISE = 1.05
"""Preemptions over those of the step before that ask for a larger size (section 4.2)."""
NUM_DEVIATIONS = 4.0
"""Standard deviations of a chance difference that the rise must exceed. A growth is taken back only after steps without
preemptions, so one false alarm in a run is too many: at 2 one step in 40 is one, at 4 one in 30,000."""
NUM_QUIET_STEPS = 4
"""Steps without preemptions that ask for a smaller one (section 4.2)."""
HEADROOM = 0.9
"""Part of the KV cache that a projected peak may fill."""
LOW_USAGE = 0.8
"""Peak usage of the KV cache below which more sequences may run."""
REFILLS = 3
"""Times that each place of a window is taken again when its lengths are played out."""
LOWER, RAISE = 0.8, 1.25
"""How the number of sequences is changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step showed: a round; in a window, which has none, enough responses, and new weights since it began."""

    num_preempted: int
    num_finished: int = 1
    """Responses that ended in it, at least 1. Preemptions are compared by response."""
    kv_usage_peak: float
    """In [0, 1]."""
    is_full: bool
    """Whether as many sequences ran as were allowed, so that others had to wait."""
    lengths: Int32[np.ndarray, "N 2"]
    """Prompt and response tokens of the last responses; may be empty."""
    is_race: bool = False
    """Whether more was started than was wanted: a short round of tail batching."""

    def preempts_more_than(self, before: "StepStats") -> bool:
        """Whether there were more than 1.05 times the preemptions of a step before, by response, and not by chance.

        The paper has the factor alone (section 4.2), which few preemptions exceed in every second step at a steady
        load. Counts a and b of n and m responses at one rate are Poisson: the deviation of a m - b n is then
        sqrt((a + b) n m).
        """
        a, n, b, m = self.num_preempted, self.num_finished, before.num_preempted, before.num_finished
        return a * m > RISE * b * n and a * m - b * n > NUM_DEVIATIONS * math.sqrt((a + b) * n * m)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticDecision:
    """What the engine should be from now on."""

    max_sequences: int
    tensor_parallel_size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBounds:
    """What a decision keeps within."""

    min_sequences: int
    """One group."""
    max_sequences: int
    """What the engine was built for."""
    min_tensor_parallel_size: int = 1
    max_tensor_parallel_size: int

    def __post_init__(self) -> None:
        """Checks that there is something between them."""
        if not 1 <= self.min_sequences <= self.max_sequences:
            raise ValueError(f"want 1 <= min <= max sequences, got {self.min_sequences} and {self.max_sequences}")
        if not 1 <= self.min_tensor_parallel_size <= self.max_tensor_parallel_size:
            raise ValueError(
                "want 1 <= min <= max tensor parallel size, got "
                f"{self.min_tensor_parallel_size} and {self.max_tensor_parallel_size}"
            )


@dataclasses.dataclass(slots=True, kw_only=True)
class ElasticPolicy:
    """The planner's state."""

    size: EngineSize
    bounds: ElasticBounds
    max_sequences: int
    tensor_parallel_size: int
    by_round: bool = True
    """Whether each weights version is a round, and so a step (publish.when=round_end). In a window a version alone
    shows too little: there a step ends once as many responses ended as may run at once, if any new version
    came since it began."""
    last_of_kind: dict[bool, StepStats] = dataclasses.field(default_factory=dict)
    """The last step with a race and the last without; empty after a change of size, whose steps can't be compared."""
    num_quiet_steps: int = 0

    def is_whole(self, num_finished: int) -> bool:
        """Whether so many responses are a step, if a new weights version came since it began; none show nothing."""
        return num_finished >= (1 if self.by_round else self.max_sequences)

    def observe(self, step: StepStats) -> ElasticDecision:
        """Takes a step in; returns what the next ones should run with."""
        size = self._next_size(step)
        if size <= self.tensor_parallel_size:  # a larger engine makes the room that fewer sequences would
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
            # Something must change even if the projection sees no need, but no faster than by half.
            new = max(now // 2, min(int(LOWER * now), fitting))
        elif not step.num_preempted and step.is_full and step.kv_usage_peak < LOW_USAGE:
            new = max(now, min(math.ceil(RAISE * now), fitting))
        else:
            new = now
        return max(self.bounds.min_sequences, min(new, self.bounds.max_sequences))

    def _holds(self, step: StepStats) -> bool:
        """Returns True if the KV cache would hold the step once more, or no length of it is known."""
        if not len(step.lengths):
            return True
        # In a window others follow those that end, so its places never empty together.
        num_requests = step.num_finished + (0 if self.by_round else REFILLS * self.max_sequences)
        peak = played_out_peak(step.lengths, num_requests=num_requests, places=self.max_sequences)
        return peak <= HEADROOM * kv_tokens_at(self.size, self.tensor_parallel_size)

    def _fits(self, step: StepStats, size: int) -> bool:
        if not len(step.lengths):
            return False
        return num_fitting(step.lengths, HEADROOM * kv_tokens_at(self.size, size)) >= self.max_sequences


def peak_kv_tokens(lengths: Int32[np.ndarray, "N 2"]) -> float:
    """Largest KV cache that one of many sequences running at once takes on average, in tokens.

    With prompts p and responses r, it is the larger of two cases:

    * all start together and none follows, max_t mean((p + t) [r >= t]): it is largest just before one ends;
    * each that ends is followed by another, sum(r (p + r / 2)) / sum(r): at any moment a place holds a sequence with
      a probability in proportion to its length, at half of it on average.

    Raises:
      ValueError: there is no length.
    """
    if not len(lengths):
        raise ValueError("the peak of no lengths is not known")
    prompts, responses = lengths[np.argsort(lengths[:, 1])].T.astype(np.float64)
    num_left = np.arange(len(lengths), 0, -1)
    together = (prompts[::-1].cumsum()[::-1] + num_left * responses).max() / len(lengths)
    if not responses.sum():
        return float(together)
    return float(max(together, (responses * (prompts + responses / 2)).sum() / responses.sum()))


def played_out_peak(lengths: Int32[np.ndarray, "N 2"], *, num_requests: int, places: int) -> int:
    """Returns the largest KV cache of so many requests of these lengths, in tokens, with so many of them at once.

    All sequences decode a token at a time; as one ends the next begins, and the last ones leave places empty.

    Args:
      lengths: prompts and responses in tokens, repeated in their order or cut.
      num_requests: responses of the step.
      places: sequences that run at once.
    """
    running: list[tuple[int, int]] = []
    """When each ends, and what it holds then."""
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
    """Sequences whose projected peak fits; no bound while no length is known."""
    if not len(lengths):
        return 2**31 - 1
    return int(max(0.0, kv_tokens) / max(peak_kv_tokens(lengths), 1.0))


def kv_tokens_at(size: EngineSize, tensor_parallel_size: int) -> float:
    """KV capacity at another tensor parallel size: each device brings the same memory, the weights are held once.

    With memory m a device and weights w, t m = kv(t) + w, all in tokens of KV cache.
    """
    total = size.kv_tokens + size.weights_kv_tokens
    return total * tensor_parallel_size / size.tensor_parallel_size - size.weights_kv_tokens
