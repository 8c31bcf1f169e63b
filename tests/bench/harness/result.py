"""The result of a bench: `results/NAME.json`, the page made of it, and the line of JSON at the end."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from launch.startup.provenance import source_commit
from tests.bench.harness import page
from tests.bench.harness.benches import BENCHES, RESULTS
from tests.bench.harness.code import PROJECT, changed_since, code_hash
from tests.bench.harness.estimates import Estimate

SMALL = flags.DEFINE_bool("small", False, "A fraction of the size, to see that it works; its numbers mean nothing.")
RESULTS_DIR = flags.DEFINE_string(
    "results_dir", None, "Folder of the results; default tests/bench/results (with --small: nothing is written)."
)
RIG = "real vLLM on one core, the learner on another, float32"
VERSIONED = ("jax", "vllm", "torch", "transformers", "numpy")
_START_S, _START_LOAD = time.monotonic(), os.getloadavg()[0]
_START_UNIX_S, _START_COMMIT = time.time(), source_commit(PROJECT)
"""Taken at import, before anything takes time and the code may change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aim:
    """Bounds of a value, and where they are from."""

    low: float | None = None
    high: float | None = None
    source: str = ""
    chosen_in_sight: bool = False
    """Settings were chosen with this value in sight, so that reaching it is no proof: the aim is never met."""

    def of(self, value: float | None, interval: Sequence[float | None] | None = None) -> dict[str, Any]:
        """Returns the aim with its value and 95% interval; a value that was not measured meets no aim.

        A met aim is certain if the whole interval is within the bounds.
        """
        low, high = (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        found = {"value": value, "aim": bounds[0] if len(bounds) == 1 else bounds, "at_least": self.high is None}
        met = value is not None and low <= value <= high and not self.chosen_in_sight
        found |= {"met": met, "source": self.source, "chosen_in_sight": self.chosen_in_sight}
        if interval is None:
            return found
        is_certain = all(end is not None and low <= end <= high for end in interval)
        return found | {"interval": list(interval), "certain": met and is_certain}


def at_least(aim: float, source: str = "") -> Aim:
    return Aim(low=aim, source=source)


def at_most(aim: float, source: str = "") -> Aim:
    return Aim(high=aim, source=source)


def within(low: float, high: float, source: str = "") -> Aim:
    return Aim(low=low, high=high, source=source)


def finish(
    bench: str,
    doc: str | None,
    *,
    values: Mapping[str, Any],
    aims: Mapping[str, Aim],
    rows: Sequence[Mapping[str, Any]] = (),
    columns: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    beside: str = RIG,
    figure: bool = False,
    is_whole: bool = True,
    **data: Any,
) -> None:
    """Prints the page, writes it with its JSON, and prints the line.

    Args:
      bench: its name in `benches.BENCHES`, which has the code that it measures.
      doc: the docstring of its module: the page's title and what was run.
      values: numbers, or `Estimate`s with their intervals; the aims are bounds of them.
      columns: format of a cell by heading, filled from a row's fields (`page.table`).
      beside: what else the machine did.
      figure: `<bench>.png` was drawn.
      is_whole: False where parts are missing, which would hide the rest: nothing is written.
      data: further fields of the JSON, such as a profile.
    """
    now, measures = conditions(), BENCHES[bench].measures
    intervals = {key: [one.low, one.high] for key, one in values.items() if isinstance(one, Estimate)}
    values = {key: one.value if isinstance(one, Estimate) else one for key, one in values.items()} | now
    met = {key: aim.of(values.get(key), intervals.get(key)) for key, aim in aims.items()}
    whole = {
        "bench": bench,
        "commit": _START_COMMIT[0][:8],
        "modified": _START_COMMIT[1],
        "measures": list(measures),
        "code": code_hash(measures),
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "machine": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "load": [now["load_at_start"], now["load_at_end"]],
            "wall_s": now["wall_s"],
            "versions": _versions(),
            "beside": beside,
        },
        "doc": doc or bench,
        "figure": figure,
        "columns": dict(columns or {}),
        "notes": list(notes),
        "values": values,
        "intervals": intervals,
        "aims": met,
        "rows": list(rows),
        **data,
    }
    whole = finite(whole)
    text = page.markdown(whole)
    print(text)
    if is_whole and (folder := results_folder()) is not None:
        if changed := changed_since(_START_UNIX_S, measures):
            raise RuntimeError(f"nothing is stored: {changed} changed while the bench ran; run it again")
        (folder / f"{bench}.json").write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
        (folder / f"{bench}.md").write_text(text)
    print(json.dumps(finite({"bench": bench, "values": values, "aims": met}), allow_nan=False), flush=True)


def results_folder() -> pathlib.Path | None:
    """Returns the folder of the results; None for a small run that was given none."""
    if RESULTS_DIR.value is None and SMALL.value:
        return None
    folder = pathlib.Path(RESULTS_DIR.value or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def stored(bench: str) -> dict[str, Any] | None:
    """Returns what an earlier run of a bench left in the folder of the results."""
    folder = results_folder()
    file = folder / f"{bench}.json" if folder is not None else None
    return json.loads(file.read_text()) if file is not None and file.is_file() else None


def conditions() -> dict[str, float]:
    """Returns the seconds since the bench began, and the machine's load average (of a minute) then and now."""
    return {
        "wall_s": time.monotonic() - _START_S,
        "load_at_start": _START_LOAD,
        "load_at_end": os.getloadavg()[0],
    }


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and the sample standard deviation (0 for one value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def finite(value: Any) -> Any:
    """Returns JSON without NaN and infinity, which become null."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
