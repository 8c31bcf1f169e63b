"""Run data of the report: metrics, evaluations, downsampling."""

import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float64, Int

from bridge.files import json_lines
from configs.run_folder import RunFolder
from launch.tools.samples.samples_view import visible
from learner.metrics.metric_names import over_all_starts

FORMAT = 1
"""Supported version of the results format."""


class ShownEstimate(msgspec.Struct, frozen=True):
    """An estimate; null if unknown."""

    value: float | None
    stderr: float | None = None


class SetResult(msgspec.Struct, frozen=True):
    """Results of one evaluation set."""

    set: str
    k: int
    problems: int
    metrics: dict[str, ShownEstimate]
    left_out: int = 0
    temperature: float | None = None
    notes: tuple[str, ...] = ()


class Results(msgspec.Struct, frozen=True):
    """A results file."""

    format: int
    model: str
    sets: tuple[SetResult, ...]
    time_s: float = 0.0
    run_dir: str | None = None
    step: int | None = None
    seed: int | None = None


def read_results(file: pathlib.Path) -> Results:
    """Reads a file of `launch.tools.evaluate`; raises ValueError if it is no results file, or has a newer format."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Results)
    except msgspec.MsgspecError as e:
        raise ValueError(f"{file}: expected a results file of launch.tools.evaluate, got an error ({e})") from e
    if found.format > FORMAT:
        raise ValueError(f"{file} has results of format {found.format}: expected at most {FORMAT}; update Sluice")
    return found


def of_run(folder: pathlib.Path) -> tuple[list[Results], int]:
    """Returns the results of a run's checkpoints by step, and the number of unreadable files."""
    found: list[Results] = []
    num_unreadable = 0
    for file in files_of(folder):
        try:
            found.append(read_results(file))
        except (ValueError, OSError):
            num_unreadable += 1
    return sorted(found, key=lambda r: (r.step or 0, r.time_s)), num_unreadable


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the result files in a run folder."""
    return sorted(RunFolder(folder).evaluated.glob("*.json"))


def rows_of(runs: Iterable[tuple[str, Sequence[Results]]], others: Sequence[Results]) -> list[dict[str, Any]]:
    """Returns one row per set and file, of the runs by label and then of `others`, without duplicates."""
    rows: list[dict[str, Any]] = []
    shown: set[tuple[object, ...]] = set()
    named = [(label, found) for label, of in runs for found in of] + [(_name(found), found) for found in others]
    for label, found in named:
        identity = (found.time_s, found.model, found.step, found.seed)
        if identity not in shown:
            shown.add(identity)
            rows += [_row(label, found, one) for one in found.sets]
    return rows


def _name(found: Results) -> str:
    return pathlib.Path(found.run_dir or found.model).name or found.model


def _row(label: str, found: Results, one: SetResult) -> dict[str, Any]:
    unscored = f", {one.left_out} not scored" if one.left_out else ""
    return {
        "model": visible(label),
        "step": "-" if found.step is None else str(found.step),
        "when": _moment(found.time_s),
        "set": visible(one.set),
        "k": str(one.k),
        "temperature": "-" if one.temperature is None else f"{one.temperature:g}",
        "problems": f"{one.problems}{unscored}",
        "avg": _shown(one.metrics.get(f"avg@{one.k}")),
        "passed": _shown(one.metrics.get(f"pass@{one.k}")),
        "majority": _shown(one.metrics.get(f"maj@{one.k}")),
        "notes": [visible(note) for note in one.notes],
    }


def _shown(estimate: ShownEstimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "-"
    return f"{estimate.value:.4f}" if estimate.stderr is None else f"{estimate.value:.4f} ± {estimate.stderr:.4f}"


def _moment(time_s: float) -> str:
    if not 0 < time_s < math.inf:
        return "-"
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


Json = dict[str, Any]
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """A run without its events and samples."""

    label: str
    """Unique label in the report."""
    folder: pathlib.Path
    config: Json
    constants: Json
    """Effective loss constants (loss.json)."""
    summary: Json
    """Summary; empty until the run has ended."""
    rows: dict[str, list[Row]]
    """Rows of metrics.jsonl by kind, sorted by step; update rows also by position in their round (`POSITION`)."""
    num_unreadable: int
    """Number of unreadable lines of metrics.jsonl."""
    starts: tuple[Json, ...] = ()
    """Lines of provenance.jsonl; empty for a run of an earlier version."""

    def of(self, kind: str) -> list[Row]:
        """Returns the rows of a kind."""
        return self.rows.get(kind, [])

    @property
    def eval_kinds(self) -> list[str]:
        """Kinds of evaluation rows: held-out first, then the named sets."""
        return sorted(kind for kind in self.rows if kind == "eval" or kind.startswith("eval/"))

    def setting(self, section: str, field: str, default: Any) -> Any:
        """Returns a config field, or `default` if the run's version lacks it."""
        fields = self.config.get(section)
        return fields.get(field, default) if isinstance(fields, dict) else default

    def count(self, section: str, field: str, default: int) -> int:
        """Returns a config field that is a positive integer, else `default`."""
        value = self.setting(section, field, default)
        return value if isinstance(value, int) and value > 0 else default

    @property
    def updates_per_round(self) -> int:
        """Updates per round, R / U."""
        per_round, per_update = (self.count("rounds", f"groups_per_{of}", 1) for of in ("round", "update"))
        return max(1, per_round // per_update)

    def updates_of(self, kind: str) -> int:
        """Returns the updates that one row of a kind covers in a running mean; 0 for a kind that is not smoothed."""
        if kind == "step":
            return 1
        return self.updates_per_round if kind == "round" or kind.startswith(POSITION) else 0

    def is_done(self, step: int) -> bool:
        """Returns True if the run finished with this step; the summary may precede a continuation."""
        return self.summary.get("outcome") == "done" and step >= self.count("run", "num_updates", 0)


def read_run(folder: pathlib.Path) -> RunData:
    """Reads a run folder; raises ValueError if the folder is no run folder."""
    run = RunFolder(folder)
    if not run.config_file.is_file():
        raise ValueError(f"{folder}: expected a run folder, got no {run.config_file.name} in it")
    config = _object(run.config_file)
    rows, num_unreadable = _rows(run.metrics)
    if "step" in rows:
        rows["step"] = list[Row](over_all_starts(rows["step"]))
    read = RunData(
        label=folder.name,
        folder=folder,
        config=config,
        constants=_object(run.loss_constants),
        summary=_object(run.summary),
        rows=rows,
        num_unreadable=num_unreadable,
        starts=tuple(json_lines(run.provenance)),
    )
    rows |= _by_position(rows.get("step", []), read.updates_per_round)
    return dataclasses.replace(read, rows=rows, label=str(read.setting("run", "name", "") or folder.name))


POSITION = "step of round "
"""Start of the kinds of update rows at one position of their round, such as `step of round 1/2`."""
_MAX_POSITIONS = 4


def _by_position(updates: Sequence[Row], per_round: int) -> dict[str, list[Row]]:
    """Returns the update rows by position in their round, on which lag and ESS depend; none for longer rounds."""
    if not 1 < per_round <= _MAX_POSITIONS:
        return {}
    found: dict[str, list[Row]] = {f"{POSITION}{p + 1}/{per_round}": [] for p in range(per_round)}
    for row in updates:
        found[f"{POSITION}{(row['step'] - 1) % per_round + 1}/{per_round}"].append(row)
    return found


def read_runs(folders: Iterable[pathlib.Path]) -> list[RunData]:
    """Reads several runs and gives them unique labels; raises ValueError if a folder is no run, or is given twice."""
    folders = list(folders)
    resolved = [f.resolve() for f in folders]
    for folder, where in zip(folders, resolved, strict=True):
        if resolved.count(where) > 1:
            raise ValueError(f"--run_dir: {folder} is given twice")
    runs = [read_run(folder) for folder in folders]
    labels = [r.label for r in runs]
    if len(set(labels)) < len(labels):
        labels = [r.folder.resolve().name for r in runs]
    if len(set(labels)) < len(labels):
        labels = [str(r.folder) for r in runs]
    return [dataclasses.replace(r, label=label) for r, label in zip(runs, labels, strict=True)]


def column(rows: Iterable[Row], name: str) -> Float64[np.ndarray, " N"]:
    """Returns a metric's values; NaN for rows without it."""
    return np.array([number(row.get(name)) for row in rows], np.float64)


def metric_names(runs: Sequence[RunData]) -> dict[str, set[str]]:
    """Returns the metric names of the runs' rows by kind; without positions if their rounds differ in updates."""
    have_equal_rounds = len({run.updates_per_round for run in runs}) <= 1
    found: dict[str, set[str]] = {}
    for kind, rows in ((kind, rows) for run in runs for kind, rows in run.rows.items()):
        if kind.startswith(POSITION) and not have_equal_rounds:
            continue
        names = found.setdefault(kind, set())
        for row in rows:
            names.update(name for name, value in row.items() if isinstance(value, (int, float)))
        names -= {"step", "incarnation", "time_s"}
    return found


def number(value: Any) -> float:
    """Returns a value as a number; NaN if it is not one."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _object(file: pathlib.Path) -> Json:
    """Reads a JSON object; empty if the file is missing or incomplete."""
    try:
        read = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return read if isinstance(read, dict) else {}


def _rows(file: pathlib.Path) -> tuple[dict[str, list[Row]], int]:
    rows: dict[str, list[Row]] = {}
    num_unreadable = 0
    if not file.is_file():
        return rows, 0
    decoder = msgspec.json.Decoder()
    with open(file, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break  # being written
            try:
                row = decoder.decode(line)
                rows.setdefault(str(row["kind"]), []).append(row | {"step": int(row["step"])})
            except (msgspec.MsgspecError, KeyError, TypeError, ValueError, OverflowError):
                num_unreadable += 1
    return {kind: sorted(of, key=lambda r: r["step"]) for kind, of in rows.items()}, num_unreadable


def json_for_script(value: Any) -> str:
    r"""Returns JSON that is safe in a script element, without `<`, `>` or `&`.

    It is pure ASCII: lone surrogates and line separators stay JSON escapes, and its length equals its size in bytes.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # non-ASCII characters are escaped already
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


MAX_POINTS = 600
"""Maximum points per curve, more than the width of a figure on most screens."""


def bins(num_rows: int, max_points: int = MAX_POINTS) -> Int[np.ndarray, " B"]:
    """Returns the start indices of equal-sized bins (the last may be smaller) over `num_rows` rows."""
    size = -(-num_rows // max_points) if num_rows else 1
    return np.arange(0, num_rows, size)


def downsample(
    values: Float64[np.ndarray, " N"], starts: Int[np.ndarray, " B"], *, largest: bool = False
) -> Float64[np.ndarray, " B"]:
    """Returns each bin's mean or maximum, ignoring NaN unless the bin has nothing else."""
    if starts.size == values.size:
        return values
    is_known = np.isfinite(values)
    num_known = np.add.reduceat(is_known.astype(np.float64), starts)
    if largest:
        found = np.maximum.reduceat(np.where(is_known, values, -np.inf), starts)
        return np.where(num_known > 0, found, np.nan)
    sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
    return np.where(num_known > 0, sums / np.maximum(num_known, 1), np.nan)


def spread_out(sizes: Sequence[int], *, budget: int) -> list[int]:
    """Returns evenly spread indices, including first and last, of items whose sizes fit `budget` in total."""
    num = len(sizes)
    if sum(sizes) <= budget:
        return list(range(num))
    low, high = 0, num
    while low < high:  # binary search for the largest number that fits
        middle = (low + high + 1) // 2
        if sum(sizes[i] for i in _evenly(num, middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return _evenly(num, low)


def _evenly(num: int, wanted: int) -> list[int]:
    if wanted <= 1:
        return [num - 1][:wanted]
    return sorted(set(np.linspace(0, num - 1, wanted).round().astype(int).tolist()))
