"""How every bench of the rig ends: a table, `results/<name>.{json,md}`, and one line of JSON."""

import dataclasses
import json
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

from absl import flags
from rich.console import Console

from configs import overrides
from configs.schema import Config
from tests.bench.rig.calibrate import Calibration

SMALL = flags.DEFINE_bool("small", False, "A fraction of the size, to see that it works; its numbers mean nothing.")
RESULTS_DIR = flags.DEFINE_string(
    "results_dir",
    None,
    "Where the results go; tests/bench/results if not given (with --small nothing is written without it).",
)
RIG = "real vLLM on one core, the learner on another, float32"
RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
_START_S, _START_LOAD = time.monotonic(), os.getloadavg()[0]
"""Taken at import: a bench imports this before anything else takes time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aim:
    """A number and what it should be."""

    value: float | None
    aim: float
    at_least: bool = True

    def to_json(self) -> dict[str, Any]:
        met = self.value is not None and (self.value >= self.aim if self.at_least else self.value <= self.aim)
        return {"value": self.value, "aim": self.aim, "met": met}


def within(value: float, bounds: tuple[float, float]) -> dict[str, Any]:
    """An aim that is met between two bounds."""
    return {"value": value, "aim": list(bounds), "met": bounds[0] <= value <= bounds[1]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table for the terminal and for markdown; cells are text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines)


def results_folder() -> pathlib.Path | None:
    """Where to write; None for a small run that was not told."""
    if RESULTS_DIR.value is not None:
        folder = pathlib.Path(RESULTS_DIR.value)
    elif SMALL.value:
        return None
    else:
        folder = RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def finish(
    bench: str,
    *,
    title: str,
    about: Sequence[str],
    table: Table,
    remarks: Sequence[str],
    values: dict[str, Any],
    aims: dict[str, dict[str, Any]],
    data: dict[str, Any],
    calibration: Calibration | None = None,
    figure: bool = True,
    beside: str = RIG,
) -> None:
    """Prints the table, writes the files and prints the line.

    Args:
      bench: its name.
      title: of the page.
      about: what was run, as paragraphs.
      table: the numbers.
      remarks: what the numbers mean, as paragraphs.
      values: for the line.
      aims: for the line.
      data: for the JSON file beside those: the profile, what was measured, the figure's data.
      calibration: of the training cost, where there was one: its ratio and its warnings go into the result.
      figure: whether `<bench>.png` is beside it.
      beside: what else the machine did.
    """
    values = values | conditions()
    if calibration is not None:
        values |= calibration.values()
        remarks = [*calibration.remarks(), *remarks]
    console = Console(width=160)
    for line in table.markdown().split("\n"):
        console.print(line, soft_wrap=True, highlight=False)
    for remark in calibration.remarks() if calibration else []:
        console.print(remark, soft_wrap=True, highlight=False)
    folder = results_folder()
    if folder is not None:
        met = Table(
            columns=["aim", "value", "wanted", "met"],
            rows=[[k, _number(a["value"]), _aim(a["aim"]), "yes" if a["met"] else "no"] for k, a in aims.items()],
        )
        parts = [f"# {title}", *about, machine(beside), table.markdown(), *remarks, met.markdown()]
        if figure:
            parts.append(f"![{title}]({bench}.png)")
        (folder / f"{bench}.md").write_text("\n\n".join(parts) + "\n")
        whole = {"bench": bench, "values": values, "aims": aims, "machine": machine(beside), **data}
        (folder / f"{bench}.json").write_text(json.dumps(_finite(whole), indent=1, allow_nan=False) + "\n")
    print(json.dumps(_finite({"bench": bench, "values": values, "aims": aims}), allow_nan=False), flush=True)


def conditions() -> dict[str, float]:
    """Seconds since the bench began, and the machine's load average (of a minute) then and now."""
    return {
        "wall_s": time.monotonic() - _START_S,
        "load_at_start": _START_LOAD,
        "load_at_end": os.getloadavg()[0],
    }


def machine(beside: str = RIG) -> str:
    """What it ran on, how long, and beside what."""
    now = conditions()
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, {beside}. "
        f"{now['wall_s']:.0f} s; load average {now['load_at_start']:.1f} at the "
        f"start, {now['load_at_end']:.1f} at the end."
    )


def measured(name: str, config: Config, **metrics: Any) -> dict[str, Any]:
    """One measured case, for the planner to predict: its whole configuration and what it gave."""
    return {"name": name, "config": json.loads(overrides.to_json(config)), "measured": metrics}


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _aim(aim: float | Sequence[float]) -> str:
    """A bound, or the lowest and the highest of a range."""
    return " to ".join(map(_number, aim)) if isinstance(aim, Sequence) else _number(aim)


def _finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
