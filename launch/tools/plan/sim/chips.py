"""The chips that train: how many there are, and the one pass that runs on them.

A learner has chips of its own, or it trains on those of the engines (a colocated system). Those are all its own once a
round's rollout has ended. RollPacker's stream trainer gives up half of them before (section 4.4, Algorithm 1): once
from 20 to 50 % of a round's responses are complete, at every further 5 %, it is tried, and done if the cache of the
engines that stay would hold what still runs.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from actor.elastic import HEADROOM, num_fitting
from launch.tools.plan.profile import LearnerProfile
from launch.tools.plan.sim.event_queue import EventQueue

FIRST, LAST, EVERY = 0.2, 0.5, 0.05
"""Complete responses over the round's, at which scaling down is tried; and how many more before the next try."""
SHARE = 2
"""One engine of so many is given up."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of training."""

    learner: LearnerProfile
    micro_batch_tokens: int

    def of(self, tokens: int, num_chips: int) -> float:
        """Gradients of groups with so many tokens, packed together."""
        num_micro_batches = math.ceil(tokens / self.micro_batch_tokens)
        return tokens * self.learner.seconds_per_token / num_chips + num_micro_batches * self.learner.micro_batch_s


@dataclasses.dataclass(eq=False, slots=True)
class _Pass:
    tokens: int
    batch: tuple[int, ...]
    """Of a pass that ends an update: the tokens of each that its batch was trained in, its own among them."""
    then: Callable[[float], None]
    start_s: float
    since_s: float
    end_s: float
    left: float = 1.0
    """Part of it that was to do at `since_s`."""


class Compute:
    """At most one pass under way; chips that come meanwhile take their part of what is left of it."""

    def __init__(self, cost: Cost, calendar: EventQueue, *, epochs: int = 1) -> None:
        """Idle; a full batch is trained `epochs` times."""
        self._cost, self._calendar, self._epochs = cost, calendar, epochs
        self._batch: list[int] = []
        self._pass: _Pass | None = None

    def start(self, tokens: int, *, ends_update: bool, num_chips: int, then: Callable[[float], None]) -> None:
        """Begins a pass over so many tokens, with the optimizer step if it ends an update.

        Args:
          tokens: of prompts and responses.
          ends_update: whether the optimizer's step follows.
          num_chips: at least 1.
          then: called at its end with the time at which it began.
        """
        now_s = self._calendar.now_s
        self._batch.append(tokens)
        self._pass = _Pass(tokens, tuple(self._batch) if ends_update else (), then, now_s, now_s, now_s)
        if ends_update:
            self._batch = []
        self._go_on(self._pass, num_chips)

    def spread(self, num_chips: int) -> None:
        """From now on so many chips share what is left of the pass, if there is one."""
        if (p := self._pass) is None or p.end_s <= p.since_s:
            return
        p.left *= (p.end_s - self._calendar.now_s) / (p.end_s - p.since_s)
        self._go_on(p, num_chips)

    def _go_on(self, p: _Pass, num_chips: int) -> None:
        took_s = self._cost.of(p.tokens, num_chips)
        if p.batch:
            # The later epochs repeat the batch's passes; nothing is waited for.
            again_s = (self._epochs - 1) * sum(self._cost.of(tokens, num_chips) for tokens in p.batch)
            took_s += again_s + self._epochs * self._cost.learner.optimizer_step_s
        p.since_s = self._calendar.now_s
        p.end_s = p.since_s + p.left * took_s
        self._calendar.at(p.end_s, self._end, p, p.end_s)

    def _end(self, p: _Pass, end_s: float) -> None:
        if p is self._pass and end_s == p.end_s:  # else it was spread meanwhile
            self._pass = None
            p.then(p.start_s)


@dataclasses.dataclass(slots=True)
class ScaleDown:
    """One round's progress, and whether half of its engines were given up."""

    num_requests: int = 0
    num_completed: int = 0
    num_since_try: int = 0
    is_done: bool = False

    def is_due(self) -> bool:
        """Whether, now that one more response is complete, it should be tried."""
        self.num_completed += 1
        self.num_since_try += 1
        is_within = FIRST * self.num_requests <= self.num_completed <= LAST * self.num_requests
        if self.is_done or not is_within or self.num_since_try < EVERY * self.num_requests:
            return False
        self.num_since_try = 0
        return True


def would_fit(lengths: Int32[np.ndarray, "N 2"], num_running: int, kv_capacity_tokens: int) -> bool:
    """Whether the projected peak of what runs fits a cache of so many tokens; a capacity of 0 has no bound."""
    return not kv_capacity_tokens or num_fitting(lengths, HEADROOM * kv_capacity_tokens) >= num_running
