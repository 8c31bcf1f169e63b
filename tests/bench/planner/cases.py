"""Measured runs in a form that the planner can predict: benches write them, `tests.bench.planner` reads them.

A bench's result file has `profile` (what launch/tools/plan/profile.py reads, measured apart from those runs; `profiles`
by name if there are several) and `measured`, a list of {"name", "config" (whole), "measured": numbers by name}; the
numbers of a case may name its profile. Those that the planner knows (`METRICS`) are compared. A run begins with its
first tickets, or after `num_skipped` updates, and ends with its last optimizer step.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

from configs import overrides
from configs.schema import Config
from launch.tools.plan import profile as plan_profile
from launch.tools.plan.profile import Profile
from launch.tools.plan.sim.event_queue import SimResult
from launch.tools.plan.sim.simulate import simulate

METRICS: Mapping[str, Callable[[SimResult], float]] = {
    "rollout_to_train_end_s": lambda o: o.round_mean("rollout_to_train_end_s"),
    "seconds": lambda o: o.seconds,
    "samples_per_s": lambda o: o.samples_per_s,
    "tokens_per_s": lambda o: o.tokens_per_s,
    "engine_fill": lambda o: o.engine_fill,
    "first_dispatch_s": lambda o: o.round_mean("first_dispatch_s"),
    "waiting_ratio": lambda o: o.round_mean("waiting_ratio"),
    "waiting_ratio_eq4": lambda o: o.round_mean("waiting_ratio_eq4"),
    "mean_lag": lambda o: o.token_lag.mean,
    "lag_mean": lambda o: o.token_lag.mean,
    "max_lag": lambda o: o.group_lag.max,
    "lag_max": lambda o: o.group_lag.max,
}
"""What a measured number means, by its name in the file."""
TIMES = ("rollout_to_train_end_s", "seconds", "samples_per_s", "tokens_per_s")
"""What the planner's aim is about: times and throughputs. The others are shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measured run."""

    name: str
    """As in "cgp R=64"."""
    config: Config
    profile: Profile
    """With the lengths that the run replayed."""
    measured: dict[str, float]
    """Numbers by their names in `METRICS`."""
    num_skipped: int = 0
    """First updates that were not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """A measured number and the planner's."""

    name: str
    metric: str
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured


def read(path: pathlib.Path) -> list[Case]:
    """The cases of a bench's result file. Raises ValueError if it holds none, or one is malformed."""
    raw = json.loads(path.read_text())
    if not isinstance(raw, dict) or not raw.get("measured"):
        raise ValueError(f"{path} has no measured runs; tests/bench/planner/cases.py says what they look like")
    cases = []
    for i, entry in enumerate(raw["measured"]):
        try:
            numbers = entry["measured"]
            profile = raw["profiles"][numbers["profile"]] if "profile" in numbers else raw["profile"]
            case = Case(
                name=entry["name"],
                config=overrides.from_dict(entry["config"]),
                profile=plan_profile.from_dict(profile),
                measured={name: float(numbers[name]) for name in METRICS if numbers.get(name) is not None},
                num_skipped=int(numbers.get("num_skipped", 0)),
            )
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path}: measured run {i}: {type(e).__name__}: {e}") from e
        if not case.measured:
            raise ValueError(f"{path}: measured run {i} has none of {', '.join(METRICS)}")
        cases.append(case)
    return cases


def errors(cases: Sequence[Case]) -> list[Error]:
    """The planner's error for each metric that was measured of each case."""
    found = []
    for case in cases:
        num_updates = case.config.run.num_updates - case.num_skipped
        outcome = simulate(case.config, case.profile, num_updates=num_updates, warmup_updates=case.num_skipped)
        found += [
            Error(name=case.name, metric=metric, measured=value, predicted=METRICS[metric](outcome))
            for metric, value in case.measured.items()
        ]
    return found


def max_relative_error(found: Sequence[Error]) -> float | None:
    """The largest over times and throughputs; None without any."""
    return max((abs(e.relative) for e in found if e.metric in TIMES), default=None)
