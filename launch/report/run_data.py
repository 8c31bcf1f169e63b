"""What a run folder says of its run, as far as it is there: a run may be under way, killed, or of an older version."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float64

from configs.run_folder import RunFolder

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
