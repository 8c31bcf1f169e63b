"""Training chips in virtual time: their number, and the one pass that runs on them.

A learner has its own chips, or trains on the engines' chips (a colocated system). The engines' chips become available
when a round's rollout has ended. RollPacker's stream trainer releases half of them earlier
(`learner/schedule/scale_down_criteria.py`).
"""

import dataclasses
import math
from collections.abc import Callable

from launch.tools.plan.profile import LearnerProfile
from launch.tools.plan.sim.event_queue import EventQueue


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
        """Starts a pass over `tokens` prompt and response tokens, and the optimizer step if it ends an update.

        `then` is called at the end with the start time of the pass.
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
