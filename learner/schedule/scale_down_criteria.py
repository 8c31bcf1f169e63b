"""Scaling down: when engines give their devices to training in a round (RollPacker section 4.4, Algorithm 1).

Scaling down is tried at every 5% of complete responses between 20% and 50% of a round. It succeeds if the KV cache of
the remaining engines can hold the running requests. Where training has devices of its own, a round like the last one of
its kind must also end sooner by it (`pays`), which is not the paper's.
"""

import dataclasses

import numpy as np
from jaxtyping import Int32

FIRST, LAST, EVERY = 0.2, 0.5, 0.05
"""Range of complete responses in which scaling down is tried, and the step between tries, as shares of a round."""
SHARE = 2
"""Number of engines per released engine."""
HEADROOM = 0.9
"""Fraction of the KV cache that a projected peak may fill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelperCosts:
    """Cost of engines that give their devices up for training and take them back."""

    start_s: float = 0.0
    """Seconds from the end of the engines' sampling until their devices compute: requests handed over, memory freed,
    parameters read."""
    hand_over_s: float = 0.0
    """Seconds per update until the learner has the sums of gradients that the devices computed; 0 if the learner itself
    computes on them."""
    wake_s: float = 0.0
    """Seconds from the publish until an engine that gave its devices up serves again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCost:
    """Cost of a round that has ended."""

    rollout_s: float
    """Seconds of its rollout, without helpers' start."""
    device_s: float
    """Device-seconds of its training."""


def pays(
    last: RoundCost | None,
    costs: HelperCosts,
    *,
    num_own: int,
    num_helping: int,
    now_s: float,
    first_s: float | None,
) -> bool:
    """Returns True if a round is expected to end sooner with the help of engines' devices from now on.

    The first round of a kind is tried, and a learner without devices of its own has no choice. `last` is the last round
    of the kind. The rollout began `now_s` ago, and its first training started `first_s` after the begin; None if
    nothing is trained yet.
    """
    if last is None or not num_own:
        return True
    begin_s, ready_s = now_s if first_s is None else first_s, now_s + costs.start_s
    alone_s = max(last.rollout_s, begin_s + last.device_s / num_own)
    left = max(0.0, last.device_s - num_own * max(0.0, ready_s - begin_s))
    helped_s = max(last.rollout_s, ready_s + left / (num_own + num_helping))
    return helped_s + costs.hand_over_s + costs.wake_s < alone_s


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

    Raises ValueError if `lengths` is empty. With prompts p and responses r, it is the larger of two cases:

    * All start together and none is replaced, max_t mean((p + t) [r >= t]): the peak is just before one finishes.
    * Each finished sequence is replaced, sum(r (p + r / 2)) / sum(r): at any moment a slot holds a sequence with
      probability proportional to its length, on average half done.
    """
    if not len(lengths):
        raise ValueError("expected at least one length, got none")
    prompts, responses = lengths[np.argsort(lengths[:, 1])].T.astype(np.float64)
    num_left = np.arange(len(lengths), 0, -1)
    together = (prompts[::-1].cumsum()[::-1] + num_left * responses).max() / len(lengths)
    if not responses.sum():
        return float(together)
    return float(max(together, (responses * (prompts + responses / 2)).sum() / responses.sum()))
