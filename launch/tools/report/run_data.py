"""Metrics, evaluations, downsampling."""

import dataclasses
import datetime
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float64, Int

from configs.run_folder import RunFolder
from launch.tools.samples.samples_view import visible

FORMAT = 1
"""Of results that are understood."""


class ShownEstimate(msgspec.Struct, frozen=True):
    """A number; null where it is not known."""

    value: float | None
    stderr: float | None = None


class SetResult(msgspec.Struct, frozen=True):
    """What is said of a set."""

    set: str
    k: int
    problems: int
    metrics: dict[str, ShownEstimate]
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
class SetRow:
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
    """Reads a file that `launch.tools.evaluate` wrote.

    Raises:
      ValueError: it is none, or of a later format.
      OSError: it can't be read.
    """
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Results)
    except msgspec.MsgspecError as e:
        raise ValueError(f"{file} is no results' file of launch.tools.evaluate: {e}") from e
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


def rows_of(runs: Iterable[tuple[str, Sequence[Results]]], others: Sequence[Results]) -> list[SetRow]:
    """A row for each set of each file: those of the runs, by label, then `others`; none twice."""
    rows: list[SetRow] = []
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


def _row(label: str, found: Results, one: SetResult) -> SetRow:
    left_out = f", {one.left_out} left out" if one.left_out else ""
    return SetRow(
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


def _shown(estimate: ShownEstimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "-"
    return f"{estimate.value:.4f}" if estimate.stderr is None else f"{estimate.value:.4f} ± {estimate.stderr:.4f}"


def _moment(time_s: float) -> str:
    """By the clock of the machine that makes the report."""
    if not 0 < time_s < math.inf:
        return "-"
    return datetime.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


Json = dict[str, Any]
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, without its events and its samples."""

    label: str
    """Tells it from the others of the report."""
    folder: pathlib.Path
    config: Json
    constants: Json
    """What the loss really uses (loss.json)."""
    summary: Json
    """Empty until the run has ended."""
    rows: dict[str, list[Row]]
    """Of metrics.jsonl by kind, in order of step."""
    num_unreadable: int
    """Lines of metrics.jsonl that can't be read."""

    def of(self, kind: str) -> list[Row]:
        """The rows of a kind."""
        return self.rows.get(kind, [])

    @property
    def eval_kinds(self) -> list[str]:
        """Kinds of rows of evaluations: of the held-out problems, then of the named sets."""
        return sorted(kind for kind in self.rows if kind == "eval" or kind.startswith("eval/"))

    def setting(self, section: str, field: str, default: Any) -> Any:
        """A field of the config, or what is taken where an older version had none."""
        fields = self.config.get(section)
        return fields.get(field, default) if isinstance(fields, dict) else default

    def count(self, section: str, field: str, default: int) -> int:
        """A field that is a whole number above 0; `default` where it is none."""
        value = self.setting(section, field, default)
        return value if isinstance(value, int) and value > 0 else default

    @property
    def updates_per_round(self) -> int:
        """R / U."""
        per_round, per_update = (self.count("rounds", f"groups_per_{of}", 1) for of in ("round", "update"))
        return max(1, per_round // per_update)

    def is_done(self, step: int) -> bool:
        """Whether it ended in order with this step; a summary may be of before it was continued."""
        return self.summary.get("outcome") == "done" and step >= self.count("run", "num_updates", 0)


def read_run(folder: pathlib.Path) -> RunData:
    """Reads a run folder.

    Raises:
      ValueError: it is none.
    """
    run = RunFolder(folder)
    if not run.config_file.is_file():
        raise ValueError(f"{folder} is no run folder (it has no {run.config_file.name})")
    config = _object(run.config_file)
    rows, num_unreadable = _rows(run.metrics)
    read = RunData(
        label=folder.name,
        folder=folder,
        config=config,
        constants=_object(run.loss_constants),
        summary=_object(run.summary),
        rows=rows,
        num_unreadable=num_unreadable,
    )
    return dataclasses.replace(read, label=str(read.setting("run", "name", "") or folder.name))


def read_runs(folders: Iterable[pathlib.Path]) -> list[RunData]:
    """Several runs, whose labels tell them apart.

    Raises:
      ValueError: one of them is no run folder, or is named twice.
    """
    folders = list(folders)
    resolved = [f.resolve() for f in folders]
    for folder, where in zip(folders, resolved, strict=True):
        if resolved.count(where) > 1:
            raise ValueError(f"{folder} is named twice")
    runs = [read_run(folder) for folder in folders]
    labels = [r.label for r in runs]
    if len(set(labels)) < len(labels):
        labels = [r.folder.resolve().name for r in runs]
    if len(set(labels)) < len(labels):
        labels = [str(r.folder) for r in runs]
    return [dataclasses.replace(r, label=label) for r, label in zip(runs, labels, strict=True)]


def column(rows: Iterable[Row], name: str) -> Float64[np.ndarray, " N"]:
    """A metric of rows; NaN where a row has none."""
    return np.array([number(row.get(name)) for row in rows], np.float64)


def metric_names(rows: Iterable[Row]) -> list[str]:
    """The metrics that any of the rows has, sorted."""
    found: set[str] = set()
    for row in rows:
        found.update(name for name, value in row.items() if isinstance(value, (int, float)))
    return sorted(found - {"step", "incarnation", "time_s"})


def number(value: Any) -> float:
    """What a file says, as a number; NaN if it is none."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan


def _object(file: pathlib.Path) -> Json:
    """A JSON object; empty where there is none, or it is being written."""
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


MAX_POINTS = 600
"""Of a curve: more than a figure is wide on most screens."""


def bins(num_rows: int, max_points: int = MAX_POINTS) -> Int[np.ndarray, " B"]:
    """Where the bins begin that `num_rows` rows are put into: all of one size, but the last."""
    size = -(-num_rows // max_points) if num_rows else 1
    return np.arange(0, num_rows, size)


def downsample(
    values: Float64[np.ndarray, " N"], starts: Int[np.ndarray, " B"], *, largest: bool = False
) -> Float64[np.ndarray, " B"]:
    """Each bin's mean, or its largest value; without NaN, unless it has nothing else."""
    if starts.size == values.size:
        return values
    is_known = np.isfinite(values)
    num_known = np.add.reduceat(is_known.astype(np.float64), starts)
    if largest:
        found = np.maximum.reduceat(np.where(is_known, values, -np.inf), starts)
        return np.where(num_known > 0, found, np.nan)
    sums = np.add.reduceat(np.where(is_known, values, 0.0), starts)
    return np.where(num_known > 0, sums / np.maximum(num_known, 1), np.nan)


def running_mean(
    values: Float64[np.ndarray, " N"], width: int
) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
    """Mean of `width` neighbours around each value, and its standard error: their spread over sqrt(n).

    The spread is between updates, so it holds the groups' as well as the responses' share, and the trend within the
    width. Fewer neighbours at the ends; the error is NaN of fewer than three values.
    """
    is_known = np.isfinite(values)
    known = np.where(is_known, values, 0.0)
    shift = known.sum() / max(1, is_known.sum())  # sums of squares of large values would lose their spread
    centred = np.where(is_known, values - shift, 0.0)
    index = np.arange(values.size)
    low = np.maximum(0, index - width // 2)
    high = np.minimum(values.size, index + (width + 1) // 2)

    def windowed(of: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        total = np.concatenate([[0.0], np.cumsum(of)])
        return total[high] - total[low]

    num = windowed(is_known.astype(np.float64))
    mean = windowed(centred) / np.maximum(num, 1)
    variance = np.maximum(windowed(centred**2) / np.maximum(num, 1) - mean**2, 0.0) * num / np.maximum(num - 1, 1)
    error = np.where(num >= 3, np.sqrt(variance / np.maximum(num, 1)), np.nan)
    return np.where(num > 0, mean + shift, np.nan), error


def spread_out(sizes: Sequence[int], *, budget: int) -> list[int]:
    """Indices of things of these sizes that fit `budget` together: evenly spread, the first and the last among them."""
    num = len(sizes)
    if sum(sizes) <= budget:
        return list(range(num))
    low, high = 0, num
    while low < high:  # the most that fit
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
