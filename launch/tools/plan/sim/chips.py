"""Training chips in virtual time: their number, and the one pass that runs on them.

A learner has its own chips, or trains on the engines' chips (a colocated system). The engines' chips become available
when a round's rollout has ended. RollPacker's stream trainer releases half of them earlier (section 4.4, Algorithm 1).
It tries at every 5% of complete responses between 20% and 50%, and succeeds if the KV cache of the remaining engines
can hold the running requests.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from launch.tools.plan.profile import LearnerProfile
from launch.tools.plan.sim.event_queue import EventQueue

FIRST, LAST, EVERY = 0.2, 0.5, 0.05
"""Range of complete responses in which scaling down is tried, and the step between tries, as shares of a round."""
SHARE = 2
"""Number of engines per released engine."""
HEADROOM = 0.9
"""Fraction of the KV cache that a projected peak may fill."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Training cost in seconds."""

    learner: LearnerProfile
    micro_batch_tokens: int

    def of(self, tokens: int, num_chips: int) -> float:
        """Returns the seconds of a gradient pass over `tokens` tokens, packed together."""
        num_micro_batches = math.ceil(tokens / self.micro_batch_tokens)
        return tokens * self.learner.seconds_per_token / num_chips + num_micro_batches * self.learner.micro_batch_s


@dataclasses.dataclass(eq=False, slots=True)
class _Pass:
    tokens: int
    batch: tuple[int, ...]
    """Tokens of all passes of the update, this one included, if the pass ends an update; else empty."""
    then: Callable[[float], None]
    start_s: float
    since_s: float
    end_s: float
    computed_s: float = 0.0
    """End of the computation; `end_s` includes the handover of helpers."""
    left: float = 1.0
    """Share of the computation that remained at `since_s`."""


class Compute:
    """Compute of at most one pass; additional chips take their share of its remainder."""

    def __init__(self, cost: Cost, calendar: EventQueue, *, epochs: int = 1) -> None:
        """Starts idle; a full batch is trained for `epochs` epochs."""
        self._cost, self._calendar, self._epochs = cost, calendar, epochs
        self._batch: list[int] = []
        self._pass: _Pass | None = None
        self.hand_over_s = 0.0
        """Seconds before the optimizer step in which helpers hand their sums over."""

    def start(self, tokens: int, *, ends_update: bool, num_chips: int, then: Callable[[float], None]) -> None:
        """Starts a pass over `tokens`, followed by the optimizer step if it ends an update.

        Args:
          tokens: prompt and response tokens.
          ends_update: True if the optimizer step follows.
          num_chips: at least 1.
          then: called at the end with the start time of the pass.
        """
        now_s = self._calendar.now_s
        self._batch.append(tokens)
        self._pass = _Pass(tokens, tuple(self._batch) if ends_update else (), then, now_s, now_s, now_s)
        if ends_update:
            self._batch = []
        self._go_on(self._pass, num_chips)

    def spread(self, num_chips: int) -> None:
        """Spreads the rest of the current pass, if any, over `num_chips` chips."""
        if (p := self._pass) is None or p.computed_s <= self._calendar.now_s:
            return
        p.left *= (p.computed_s - self._calendar.now_s) / (p.computed_s - p.since_s)
        self._go_on(p, num_chips)

    @property
    def left_s(self) -> float:
        """Seconds that the current pass still takes."""
        return 0.0 if self._pass is None else max(0.0, self._pass.end_s - self._calendar.now_s)

    def _go_on(self, p: _Pass, num_chips: int) -> None:
        took_s = self._cost.of(p.tokens, num_chips)
        if p.batch:
            # Later epochs repeat the passes of the batch without waiting for groups.
            again_s = (self._epochs - 1) * sum(self._cost.of(tokens, num_chips) for tokens in p.batch)
            took_s += again_s + self._epochs * self._cost.learner.optimizer_step_s
        p.since_s = self._calendar.now_s
        p.computed_s = p.since_s + p.left * took_s
        p.end_s = p.computed_s + (self.hand_over_s if p.batch else 0.0)
        self._calendar.at(p.end_s, self._end, p, p.end_s)

    def _end(self, p: _Pass, end_s: float) -> None:
        if p is self._pass and end_s == p.end_s:  # otherwise the pass was rescheduled
            self._pass = None
            p.then(p.start_s)


@dataclasses.dataclass(slots=True)
class ScaleDown:
    """Progress of a round, and whether half of its engines were released."""

    num_requests: int = 0
    num_completed: int = 0
    num_since_try: int = 0
    is_done: bool = False

    def is_due(self) -> bool:
        """Counts a complete response; returns True if scaling down should be tried."""
        self.num_completed += 1
        self.num_since_try += 1
        is_within = FIRST * self.num_requests <= self.num_completed <= LAST * self.num_requests
        if self.is_done or not is_within or self.num_since_try < EVERY * self.num_requests:
            return False
        self.num_since_try = 0
        return True


def would_fit(lengths: Int32[np.ndarray, "N 2"], num_running: int, kv_capacity_tokens: int) -> bool:
    """Returns True if the projected peak of running requests fits the cache; capacity 0 means no bound."""
    return not kv_capacity_tokens or num_fitting(lengths, HEADROOM * kv_capacity_tokens) >= num_running


def num_fitting(lengths: Int32[np.ndarray, "N 2"], kv_tokens: float) -> int:
    """Returns how many sequences fit by projected peak; 2**31 - 1 while no lengths are known."""
    if not len(lengths):
        return 2**31 - 1
    return int(max(0.0, kv_tokens) / max(peak_kv_tokens(lengths), 1.0))


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
