"""Measured runs in a form that the planner can predict: benches write them, `tests.bench.planner` reads them.

A bench's JSON holds `"cases": [...]`, each with the config's overrides over a preset, the profile measured in that very
run (its lengths under `response_tokens`, kind `groups`), and what came out.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from configs import overrides
from configs.schema import Config
from launch import plan_profile
from launch.plan_outcome import Outcome
from launch.plan_profile import Profile
from launch.plan_simulate import simulate

Metric = Literal[
    "rollout_to_train_end_s", "first_dispatch_s", "waiting_ratio", "waiting_ratio_eq4", "samples_per_s", "step_s"
]
TIMES: tuple[Metric, ...] = ("rollout_to_train_end_s", "samples_per_s", "step_s")
"""What the planner's aim is about: times and throughputs. The others are shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One measured run."""

    name: str
    """As in "cgp R=64"."""
    preset: str
    """As --config takes it: configs/cgp.py:tiny."""
    overrides: dict[str, str]
    """Over the preset, as on the command line: {"rounds.groups_per_round": "64"}."""
    profile: Profile
    num_updates: int
    """Optimizer steps that count."""
    warmup_updates: int = 0
    """Steps before those."""
    measured: dict[Metric, float]

    @property
    def config(self) -> Config:
        """The run's."""
        return overrides.apply(overrides.load_preset(self.preset), self.overrides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """A measured number and the planner's."""

    name: str
    metric: Metric
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted - self.measured) / self.measured


def to_json(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Plain data for a bench's result file."""
    return [dataclasses.asdict(case) for case in cases]


def read(path: pathlib.Path) -> list[Case]:
    """The cases of a bench's result file.

    Raises:
      ValueError: it holds none, or one is malformed.
    """
    raw = json.loads(path.read_text())
    if not isinstance(raw, dict) or not raw.get("cases"):
        raise ValueError(f"{path} has no cases; the bench that writes it is older than tests/bench/cases.py")
    cases = []
    for i, entry in enumerate(raw["cases"]):
        try:
            profile = plan_profile.from_dict(entry["profile"])
            cases.append(dataclasses.replace(msgspec.convert(entry, Case), profile=profile))
        except (msgspec.ValidationError, ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path}: case {i}: {e}") from e
    return cases


def predicted(outcome: Outcome, metric: Metric) -> float:
    """What the planner says of a metric."""
    if metric in ("samples_per_s", "step_s"):
        return getattr(outcome, metric)
    return outcome.round_mean(metric)


def errors(cases: Sequence[Case]) -> list[Error]:
    """The planner's error for each metric that was measured of each case."""
    found = []
    for case in cases:
        outcome = simulate(case.config, case.profile, num_updates=case.num_updates, warmup_updates=case.warmup_updates)
        found += [
            Error(name=case.name, metric=metric, measured=value, predicted=predicted(outcome, metric))
            for metric, value in case.measured.items()
        ]
    return found


def max_relative_error(found: Sequence[Error]) -> float | None:
    """The largest over times and throughputs; None without any."""
    return max((abs(e.relative) for e in found if e.metric in TIMES), default=None)


def compare(measured: Sequence[Case]) -> float | None:
    """The planner's largest relative error over the times and throughputs of these runs; None without any."""
    return max_relative_error(errors(measured))
