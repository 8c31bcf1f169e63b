"""What curves may be drawn over: optimizer steps, training time or trained tokens. Pure; numpy in float64."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from launch.report.run_data import RunData, column

STEP, TIME, TOKENS = "step", "time", "tokens"
_TIME_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_TOKEN_UNITS = ((2e9, 1e9, ", billions"), (2e6, 1e6, ", millions"), (2e4, 1e3, ", thousands"), (0.0, 1.0, ""))
"""(from this largest value on, what is divided by, what it then is)."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One of the things that curves may be drawn over."""

    name: str
    """Of its column."""
    title: str
    """As it is chosen."""
    label: str
    """With its unit."""
    largest: float
    """Over all runs."""
    per_unit: float = 1.0


class Axes:
    """The axes of some runs: steps, and the others if a run has them."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        """Finds what they have, and units fit for all of them."""
        largest = {name: max((_largest(run, name) for run in runs), default=0.0) for name in (STEP, TIME, TOKENS)}
        self.all = [Axis(STEP, "steps", "optimizer step", max(largest[STEP], 1.0))]
        if largest[TIME] > 0:
            _, per_unit, unit = next(u for u in _TIME_UNITS if largest[TIME] >= u[0])
            label = f"{unit} since the training began"
            self.all.append(Axis(TIME, "training time", label, largest[TIME] / per_unit, per_unit))
        if largest[TOKENS] > 0:
            _, per_unit, unit = next(u for u in _TOKEN_UNITS if largest[TOKENS] >= u[0])
            label = f"trained tokens{unit}"
            self.all.append(Axis(TOKENS, "trained tokens", label, largest[TOKENS] / per_unit, per_unit))

    def columns(self, run: RunData, kind: str) -> dict[str, Float64[np.ndarray, " N"]]:
        """Where each row of a kind is on each axis; NaN on what its run doesn't have."""
        return {axis.name: positions(run, kind, axis.name) / axis.per_unit for axis in self.all}


def positions(run: RunData, kind: str, axis: str) -> Float64[np.ndarray, " N"]:
    """Where each row of a kind is: its step, seconds since the training began, or tokens trained up to its step.

    Seconds are by the clock that the rows bear (`time_s`), so a pause between two starts of a run is in them; of a run
    whose rows bear none they are those of its updates, added up. A row without a time of its own, as an evaluation's,
    lies where its step does.
    """
    at = column(run.of(kind), "step")
    if axis == STEP:
        return at
    updates = run.of("step")
    steps = column(updates, "step")
    if not steps.size:
        return np.full(at.size, np.nan)
    if axis == TOKENS:
        trained = column(updates, "tokens")
        return _between(at, steps, np.cumsum(_known(trained))) if np.isfinite(trained).any() else at * np.nan
    clock, took_s = column(updates, "time_s"), _known(column(updates, "time/step_s"))
    if not np.isfinite(clock).all():
        return _between(at, steps, np.cumsum(took_s)) if took_s.any() else at * np.nan
    begin_s = min([clock[0] - took_s[0], *(_first_s(run, of) for of in run.rows)])
    own = column(run.of(kind), "time_s") - begin_s
    by_step = _between(at, steps, clock - begin_s, start=clock[0] - took_s[0] - begin_s)
    return np.where(np.isfinite(own), own, by_step)


def _known(values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
    return np.where(np.isfinite(values), values, 0.0)


def _first_s(run: RunData, kind: str) -> float:
    """When the first row of a kind was written, Unix time; infinity where none says."""
    found = column(run.of(kind), "time_s")
    found = found[np.isfinite(found)]
    return float(found.min()) if found.size else float("inf")


def _between(
    at: Float64[np.ndarray, " N"],
    steps: Float64[np.ndarray, " M"],
    values: Float64[np.ndarray, " M"],
    *,
    start: float = 0.0,
) -> Float64[np.ndarray, " N"]:
    """The value at each step, where `values` were at theirs, and `start` before the first."""
    return np.interp(at, [steps[0] - 1, *steps], [start, *values])


def _largest(run: RunData, axis: str) -> float:
    found = [positions(run, kind, axis) for kind in run.rows]
    known = [float(np.nanmax(values)) for values in found if np.isfinite(values).any()]
    return max((value for value in known if np.isfinite(value)), default=0.0)
