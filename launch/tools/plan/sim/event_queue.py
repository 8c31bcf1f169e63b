"""Event queue, clock, one simulated run, its result."""

import dataclasses
import heapq
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class EventQueue:
    """Events in order of time; those of one time in order of entry."""

    def __init__(self) -> None:
        """Empty, at 0 s."""
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Has `call(*args)` made at `time_s`, or now if that is past."""
        self._num += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num, call, args))

    def step(self) -> bool:
        """Makes the next call; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, call, args = heapq.heappop(self._events)
        call(*args)
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lag:
    """Of tokens or groups, in optimizer steps; a group's is its oldest token's."""

    mean: float
    p95: float
    max: int

    @classmethod
    def of(cls, weight_by_lag: Mapping[int, float]) -> "Lag":
        """From how many there are of each lag; zeros if there are none."""
        if not weight_by_lag:
            return cls(mean=0.0, p95=0.0, max=0)
        lags = sorted(weight_by_lag)
        weights = np.array([weight_by_lag[lag] for lag in lags])
        rank = np.searchsorted(np.cumsum(weights), 0.95 * weights.sum())
        mean = float(np.average(lags, weights=weights))
        return cls(mean=mean, p95=float(lags[min(int(rank), len(lags) - 1)]), max=lags[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimResult:
    """Over the steps that count: those after the warm-up."""

    seconds: float
    num_steps: int
    num_samples: int
    step_s: float
    """Mean time from one optimizer step to the next."""
    samples_per_s: float
    """Samples trained."""
    tokens_per_s: float
    """Response tokens trained: what rates are compared by. What a run leaves behind are the longest responses (dropped
    as stale, overtaken, still in progress at the end), and by samples it would gain from that."""
    rounds: tuple[Mapping[str, float], ...]
    """Each whole round's metrics, as `learner/metrics/step_timer.py` gives them."""
    token_lag: Lag
    group_lag: Lag
    engine_utilisation: float
    """Share of the engines' time with a request in place."""
    engine_fill: float
    """Sequences in place over max_num_seqs, mean over engines and time."""
    learner_utilisation: float
    """Share of the time in which the learner computes."""
    wasted_tokens: float
    """Response tokens of requests that were aborted, of all steps."""
    recomputed_tokens: float
    """Tokens whose keys and values were computed again, of all steps."""
    num_preemptions: int
    num_dropped: Mapping[str, int]
    """Groups that were not trained, by reason, of all steps."""
    store_s: float = 0.0
    """From a group's being handed in to its being there for the learner, mean over all steps."""
    update_s: float = 0.0
    """From the export of a version to engines that serve it, mean over all that reached them."""

    def round_mean(self, name: str) -> float:
        """Mean over the rounds of `waiting_ratio_eq4`, `waiting_ratio`, `rollout_to_train_end_s`, `first_dispatch_s`.

        NaN if no whole round counts.
        """
        values = [r[f"round/{name}"] for r in self.rounds]
        return float(np.mean(values)) if values else float("nan")


class SimRecorder:
    """Collects while the simulation runs."""

    def __init__(self) -> None:
        """Nothing counts yet."""
        self.is_on = False
        """Whether what happens counts."""
        self.compute_s = 0.0
        self.num_steps = 0
        self.num_samples = 0
        self.num_tokens = 0
        self.token_lag: dict[int, float] = {}
        self.group_lag: dict[int, float] = {}
        self.rounds: list[Mapping[str, float]] = []

    def trained(self, step: int, tokens_by_step: Mapping[int, float], num_samples: int, num_tokens: int) -> None:
        """A group is trained at `step`."""
        if not self.is_on:
            return
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        oldest = step - min(tokens_by_step)
        self.group_lag[oldest] = self.group_lag.get(oldest, 0.0) + 1
        for version, tokens in tokens_by_step.items():
            lag = step - version
            self.token_lag[lag] = self.token_lag.get(lag, 0.0) + tokens

    def computed(self, seconds: float) -> None:
        """The learner computed."""
        self.compute_s += seconds * self.is_on
