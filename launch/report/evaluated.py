"""What `launch.evaluate` wrote (docs/evaluation.md), as the rows of the report's table."""

import dataclasses
import datetime
import math
import pathlib
from collections.abc import Iterable, Sequence

import msgspec

from configs.run_folder import RunFolder
from launch.samples.text import visible

FORMAT = 1
"""Of results that are understood."""


class Estimate(msgspec.Struct, frozen=True):
    """A number; null where it is not known."""

    value: float | None
    stderr: float | None = None


class SetResult(msgspec.Struct, frozen=True):
    """What is said of a set."""

    set: str
    k: int
    problems: int
    metrics: dict[str, Estimate]
    left_out: int = 0
    temperature: float | None = None
    notes: tuple[str, ...] = ()


class Results(msgspec.Struct, frozen=True):
    """A results' file."""

    format: int
    model: str
    sets: tuple[SetResult, ...]
    time_s: float = 0.0
    run_dir: str | None = None
    step: int | None = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A set as it was evaluated once; all as it is shown."""

    model: str
    step: str
    when: str
    set: str
    k: str
    temperature: str
    problems: str
    avg: str
    passed: str
    majority: str
    notes: tuple[str, ...]


def read_results(file: pathlib.Path) -> Results:
    """Reads a file that `launch.evaluate` wrote.

    Raises:
      ValueError: it is none, or of a later format.
      OSError: it can't be read.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Results)
    except msgspec.MsgspecError as e:
        raise ValueError(f"{file} is no results' file of launch.evaluate: {e}") from e
    if found.format > FORMAT:
        raise ValueError(f"{file} has results of format {found.format}, this Sluice reads up to {FORMAT}")
    return found


def of_run(folder: pathlib.Path) -> tuple[list[Results], int]:
    """What was found of a run's checkpoints, in the order of their steps; and how many files can't be read."""
    found: list[Results] = []
    num_unreadable = 0
    for file in files_of(folder):
        try:
            found.append(read_results(file))
        except (ValueError, OSError):
            num_unreadable += 1
    return sorted(found, key=lambda r: (r.step or 0, r.time_s)), num_unreadable


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """The results' files beside a run."""
    return sorted(RunFolder(folder).evaluated.glob("*.json"))


def rows_of(runs: Iterable[tuple[str, Sequence[Results]]], others: Sequence[Results]) -> list[Row]:
    """A row for each set of each file: those of the runs, by label, then `others`; none twice."""
    rows: list[Row] = []
    shown: set[tuple[object, ...]] = set()
    named = [(label, found) for label, of in runs for found in of] + [(_name(found), found) for found in others]
    for label, found in named:
        identity = (found.time_s, found.model, found.step, found.seed)
        if identity not in shown:
            shown.add(identity)
            rows += [_row(label, found, one) for one in found.sets]
    return rows


def _name(found: Results) -> str:
    """Of what was evaluated: the run, or the model's folder."""
    return pathlib.Path(found.run_dir or found.model).name or found.model


def _row(label: str, found: Results, one: SetResult) -> Row:
    left_out = f", {one.left_out} left out" if one.left_out else ""
    return Row(
        model=visible(label),
        step="-" if found.step is None else str(found.step),
        when=_moment(found.time_s),
        set=visible(one.set),
        k=str(one.k),
        temperature="-" if one.temperature is None else f"{one.temperature:g}",
        problems=f"{one.problems}{left_out}",
        avg=_shown(one.metrics.get(f"avg@{one.k}")),
        passed=_shown(one.metrics.get(f"pass@{one.k}")),
        majority=_shown(one.metrics.get(f"maj@{one.k}")),
        notes=tuple(visible(note) for note in one.notes),
    )


def _shown(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "-"
    return f"{estimate.value:.4f}" if estimate.stderr is None else f"{estimate.value:.4f} ± {estimate.stderr:.4f}"


def _moment(time_s: float) -> str:
    """By the clock of the machine that makes the report."""
    if not 0 < time_s < math.inf:
        return "-"
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")
