"""Event queue with its clock, and the result of a simulated run."""

import dataclasses
import heapq
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class EventQueue:
    """Events ordered by time; simultaneous events in order of entry."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedules `call(*args)` for `time_s`, or for now if that is past."""
        self._num += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num, call, args))

    def step(self) -> bool:
        """Runs the next call; returns False if there is none."""
        if not self._events:
            return False
        self.now_s, _, call, args = heapq.heappop(self._events)
        call(*args)
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lag:
    """Lag of tokens or groups, in optimizer steps; a group's lag is that of its oldest token."""

    mean: float
    p95: float
    max: int

    @classmethod
    def of(cls, weight_by_lag: Mapping[int, float]) -> "Lag":
        """Computes the statistics from the weight per lag; all zero without weights."""
        if not weight_by_lag:
            return cls(mean=0.0, p95=0.0, max=0)
        lags = sorted(weight_by_lag)
        weights = np.array([weight_by_lag[lag] for lag in lags])
        rank = np.searchsorted(np.cumsum(weights), 0.95 * weights.sum())
        mean = float(np.average(lags, weights=weights))
        return cls(mean=mean, p95=float(lags[min(int(rank), len(lags) - 1)]), max=lags[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimResult:
    """Result of a simulated run, over the counted steps after the warm-up."""

    seconds: float
    num_steps: int
    num_samples: int
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    """Trained response tokens/s, the metric for comparing rates. Samples/s would favor runs that leave the longest
    responses untrained (stale, evicted, or unfinished at the end)."""
    rounds: tuple[Mapping[str, float], ...]
    """Metrics per whole round, as in `learner/metrics/round_times.py`."""
    token_lag: Lag
    group_lag: Lag
    engine_utilisation: float
    """Share of the engines' time with at least one request."""
    engine_fill: float
    """Running sequences over max_num_seqs, averaged over engines and time."""
    learner_utilisation: float
    """Share of time in which the learner computes."""
    wasted_tokens: float
    """Response tokens of aborted requests, including warm-up."""
    recomputed_tokens: float
    """Tokens whose keys and values were recomputed, including warm-up."""
    num_preemptions: int
    num_dropped: Mapping[str, int]
    """Groups not trained, by reason, including warm-up."""
    store_s: float = 0.0
    """Mean seconds from submission until the learner can read a group, including warm-up."""
    update_s: float = 0.0
    """Mean seconds from a version's export until engines serve it."""

    def round_mean(self, name: str) -> float:
        """Returns the mean over rounds of a metric, such as `waiting_ratio`; NaN if no whole round counts."""
        values = [r[f"round/{name}"] for r in self.rounds]
        return float(np.mean(values)) if values else float("nan")


class SimRecorder:
    """Recorder of metrics during the simulation."""

    def __init__(self) -> None:
        self.is_on = False
        """True if events count."""
        self.compute_s = 0.0
        self.num_steps = 0
        self.num_samples = 0
        self.num_tokens = 0
        self.token_lag: dict[int, float] = {}
        self.group_lag: dict[int, float] = {}
        self.rounds: list[Mapping[str, float]] = []

    def trained(self, step: int, tokens_by_step: Mapping[int, float], num_samples: int, num_tokens: int) -> None:
        """Records a group trained at `step`."""
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
        """Records seconds of learner compute."""
        self.compute_s += seconds * self.is_on
