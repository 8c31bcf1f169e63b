"""Writer of metrics.jsonl and its in-process view."""

import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bridge.files import replace_file
from configs.run_folder import RunFolder
from learner.metrics.metric_names import meaning

if TYPE_CHECKING:
    from learner.metrics.tensorboard import TensorBoardSink


class MetricsWriter:
    """Writer that appends rows to metrics.jsonl and passes them to a view.

    Beside its metrics a row has `kind` (step, eval, eval/SET of another evaluation set, round or probe), `step` (of an
    evaluation, that of its weights), `incarnation` (number of the learner start, from 0) and `time_s` (Unix seconds).

    A restarted learner resumes at its checkpoint's step. Rows after that step belong to an abandoned branch and move to
    metrics.abandoned.jsonl, so that the steps of metrics.jsonl are contiguous.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        restored_step: int,
        incarnation: int,
        view: "TensorBoardSink | None" = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the record for rows after `restored_step`; `clock` returns Unix seconds."""
        self._folder = pathlib.Path(folder)
        self._incarnation = incarnation
        self._path = RunFolder(self._folder).metrics
        self._move_abandoned(restored_step)
        self._file = open(self._path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  # open as long as the run
        self._view, self._clock = view, clock

    def write(self, kind: str, step: int, values: Mapping[str, Any], **extra: Any) -> None:
        """Writes a row; a step has exactly one row of kind "step".

        `values` are scalars, of which NaN and infinities are written as null. `extra` are JSON values for the record
        only, such as group ids. Raises KeyError if a name of `values` is neither in `METRICS` nor in `FAMILIES`.
        """
        unknown = sorted(name for name in values if meaning(name) is None)
        if unknown:
            raise KeyError(f"metrics without a name and unit in learner/metrics/metric_names.py: {unknown}")
        scalars = {k: float(v) for k, v in values.items()}
        time_s = round(self._clock(), 3)
        row = {
            "kind": kind,
            "step": step,
            "incarnation": self._incarnation,
            "time_s": time_s,
            **{k: v if math.isfinite(v) else None for k, v in scalars.items()},
            **extra,
        }
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        if self._view is not None:
            self._view.write(step, scalars, time_s=time_s)

    def last_step(self, kind: str) -> int | None:
        """Returns the step of the last row of a kind, or None."""
        return max(self.steps(kind), default=None)

    def steps(self, kind: str) -> set[int]:
        """Returns the steps that have a row of a kind."""
        return {r["step"] for r in read_rows(self._path) if r["kind"] == kind}

    def close(self) -> None:
        """Closes the record and the view."""
        self._file.close()
        if self._view is not None:
            self._view.close()

    def _move_abandoned(self, step: int) -> None:
        if not self._path.is_file():
            return
        rows = read_rows(self._path)
        keep = [r for r in rows if r["step"] <= step]
        rest = [r for r in rows if r["step"] > step]
        with open(RunFolder(self._folder).abandoned_metrics, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(r) + "\n" for r in rest)
        replace_file(self._path, "".join(json.dumps(r) + "\n" for r in keep).encode())


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns all rows of a metrics file, without the incomplete last line of a killed process."""
    rows = []
    lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as e:
            if number != len(lines):
                raise ValueError(f"{path}:{number}: not JSON") from e
    return rows
