"""Rows of metrics.jsonl for W&B, MLflow and Trackio: feed and registry.

The record is metrics.jsonl, so nothing waits in memory: what a tracker doesn't take stays there until it does, or until
the next start. What it has is kept in a small file beside (`Marks`). Steps that a restarted learner makes again are not
sent again: no tracker can take values back, so those of the abandoned future stay there, and the file
metrics.abandoned.jsonl has them, too.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

from absl import logging

from bridge.files import replace_file
from configs.extras import install_command
from learner.metrics.metric_names import FAMILIES, METRICS, meaning

Row = Mapping[str, Any]
"""A row of metrics.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackerRunInfo:
    """What a tracker is told of a run when it is opened."""

    run: str
    """The run's id: a learner that was started again is the same run."""
    name: str
    """The run's name, which others may have, too."""
    project: str
    config: Mapping[str, Any]
    folder: pathlib.Path
    """Where a tracker keeps what it keeps on this machine, unless its own environment says otherwise; made by it."""


class Tracker(Protocol):
    """An open run of a tracker; used by one thread of a process of its own."""

    where: str
    """What to open or to call to see it; empty if that is not known."""
    is_sure_when_closed: bool
    """Whether what `send` took waits in this process, so that it is there for sure only once `close` has returned."""

    def send(self, rows: Sequence[Row]) -> None:
        """Takes rows, oldest first.

        Raises:
          Exception: it did not; the same rows come again.
        """
        ...

    def close(self) -> None:
        """Hands over what it still holds; what it is waiting for may take for ever, so others bound it."""
        ...


def scalars(row: Row) -> dict[str, float]:
    """A row's metrics: what has a name and a unit, and a value."""
    return {name: float(value) for name, value in row.items() if value is not None and meaning(name) is not None}


def written_s(row: Row) -> float:
    """When a row was written, in Unix seconds; of one that doesn't say it, as older versions', now."""
    return row.get("time_s") or time.time()


def meanings() -> dict[str, str]:
    """Unit and meaning of every metric, by its name; of families by their pattern."""
    return METRICS | FAMILIES


def table() -> str:
    """`meanings` as a Markdown table."""
    rows = [f"| `{name}` | {said} |" for name, said in meanings().items()]
    return "\n".join(["| metric | unit and meaning |", "|---|---|", *rows])


MAX_ROWS = 200
"""Handed over at once."""
POLL_S = 1.0
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 120.0
"""Before what failed is tried again; doubled each time."""


class TrackerRefusedError(Exception):
    """A tracker did not take the metrics, and nobody waits until it does."""


class UnsureError(Exception):
    """A tracker took metrics, and may have lost them."""


@dataclasses.dataclass
class SentSteps:
    """What a tracker has of a run, in a file of its own."""

    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    """Kind of row -> the last step that it has of it; the steps of a kind rise."""
    num_sent: int = 0
    num_unsure: int = 0
    """Rows that were handed over and may not be there, as its process was killed, or it failed to end; they are not
    sent again. While one runs that keeps what it takes in memory (`Tracker.is_sure_when_closed`), all of its start."""
    num_left: int = 0
    """Rows that it had not taken at the end of the last start."""
    where: str = ""
    """See `Tracker.where`."""
    problem: str = ""
    """Why it took none last; empty if it did."""

    @classmethod
    def read(cls, path: pathlib.Path) -> "SentSteps":
        """The file's; new ones if there is none.

        Raises:
          ValueError: it can't be read.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError) as e:
            raise ValueError(f"{path} is not what a tracker's process wrote ({e}); remove it to send all anew") from e

    def write(self, path: pathlib.Path) -> None:
        """Whole or not at all."""
        replace_file(path, (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode())


class TrackerFeed:
    """One tracker's reading of the record."""

    def __init__(
        self,
        record: pathlib.Path,
        marks: pathlib.Path,
        open_tracker: Callable[[], Tracker],
        *,
        wait: Callable[[float], None],
        name: str,
        is_patient: bool = True,
    ) -> None:
        """Opens nothing yet.

        Args:
          record: metrics.jsonl; need not be there yet.
          marks: where `Marks` are kept; nobody else writes them.
          open_tracker: called until it succeeds, and again after a failure.
          wait: for so many seconds, or until there may be something new.
          name: of the tracker, for log lines.
          is_patient: to try again what failed, for as long as it takes.

        Raises:
          ValueError: the marks can't be read.
        """
        self._record, self._path, self._open, self._wait, self._name = record, marks, open_tracker, wait, name
        self.marks = SentSteps.read(marks)
        if self.marks.num_unsure:
            logging.warning(
                "%s: %d rows were handed over, and its process ended before they were there; they may be missing",
                name,
                self.marks.num_unsure,
            )
        self._file: BinaryIO | None = None
        self._waiting: list[dict[str, Any]] = []
        """Rows that were read and not sent, `MAX_ROWS` at most."""
        self._tracker: Tracker | None = None
        self._num_taken = 0
        """Rows since it was opened."""
        self._num_failures = 0
        self._is_patient = is_patient

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Sends what is there, then what comes, until it is over and all is sent; then closes the tracker.

        A tracker that never takes anything keeps it here for ever: who calls it says for how long (`give_up`).

        Raises:
          RefusedError: it failed, where it is not patient.
          UnsureError: see `close`.
        """
        while True:
            was_over = is_over()  # asked first: what was written before is read
            self._waiting = self._waiting or self._read()
            if self._waiting:
                self._deliver()
            elif was_over:
                break
            else:
                self._wait(POLL_S)
        self.close()

    def close(self) -> None:
        """Closes the tracker; notes that it has all, or how many rows may not be there.

        Raises:
          UnsureError: it failed to end, where it is not patient.
        """
        self._note(num_left=0)
        if self._tracker is None:
            return
        tracker, self._tracker = self._tracker, None
        try:
            tracker.close()
        except Exception as e:  # whatever a library raises that we don't know
            self._did_not_close(e)
        else:
            self._note(num_unsure=0)

    def give_up(self) -> int:
        """Notes how many rows it has not taken; from any thread, while `follow` hangs in the tracker."""
        num_left = 0
        with contextlib.suppress(FileNotFoundError), open(self._record, "rb") as file:
            num_left = sum(not self._has(row) for row in _whole_lines(file))
        self._note(num_left=num_left, problem=self.marks.problem or "it did not answer in time")
        return num_left

    def _deliver(self) -> None:
        rows, before = self._waiting, dict(self.marks.sent)
        try:
            if self._tracker is None:
                self._tracker, self._num_taken = self._open(), 0
                self._note(where=self._tracker.where)
            # Noted first: a step that is sent twice is wrong for good, one of a killed moment is only missing.
            self._note(
                sent=before | {row["kind"]: row["step"] for row in rows}, num_unsure=self._num_in_memory + len(rows)
            )
            self._tracker.send(rows)
        except Exception as e:  # whatever a library raises that we don't know
            self._failed(e, before)
            return
        self._num_taken += len(rows)
        self._note(num_unsure=self._num_in_memory, num_sent=self.marks.num_sent + len(rows), problem="")
        if self._num_failures:
            logging.info("%s: reached again", self._name)
        self._num_failures, self._waiting = 0, []

    def _failed(self, error: Exception, sent: dict[str, int]) -> None:
        problem = _one_line(error)
        if problem != self.marks.problem and self._is_patient:
            logging.error("%s takes no metrics: %s; they wait in %s", self._name, problem, self._record)
        self._note(sent=sent, num_unsure=self._num_in_memory, problem=problem)
        if not self._is_patient:
            raise TrackerRefusedError(f"{self._name} takes no metrics: {problem}") from error
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 30), MAX_PAUSE_S)
        self._num_failures += 1
        self._wait(pause_s)

    def _did_not_close(self, error: Exception) -> None:
        problem = _one_line(error)
        self._note(num_unsure=self._num_taken, problem=problem)
        said = (
            f"{self._name} did not end in order: {problem}; {self._num_taken} rows of this start may be missing there"
        )
        if not self._is_patient:
            raise UnsureError(said) from error
        logging.error("%s", said)

    @property
    def _num_in_memory(self) -> int:
        """Rows that it took and that are lost with this process."""
        return self._num_taken if self._tracker is not None and self._tracker.is_sure_when_closed else 0

    def _note(self, **fields: Any) -> None:
        marks = dataclasses.replace(self.marks, **fields)
        if marks != self.marks:
            marks.write(self._path)
            self.marks = marks

    def _has(self, row: dict[str, Any]) -> bool:
        """Whether it has a row, or there is nothing in it for a tracker."""
        return row["step"] <= self.marks.sent.get(row["kind"], -1) or not scalars(row)

    def _read(self) -> list[dict[str, Any]]:
        """The next rows that it has not, oldest first; none where there is nothing new."""
        if self._file is None:
            try:
                self._file = open(self._record, "rb")  # noqa: SIM115  # open as long as the feed
            except FileNotFoundError:
                return []
        rows: list[dict[str, Any]] = []
        for row in _whole_lines(self._file):
            if not self._has(row):
                rows.append(row)
                if len(rows) == MAX_ROWS:
                    break
        return rows


def _one_line(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]


def _whole_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Rows from where the file is read; stays before a line that is not whole yet."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), 1)
            return
        yield json.loads(line)


@dataclasses.dataclass(frozen=True)
class TrackerKind:
    """A tracker that rows are brought to by a process of its own."""

    module: str
    """Ours, which has `open_tracker`; it is imported in that process alone."""
    packages: tuple[str, ...]
    """What must be importable."""
    extra: str
    """Of the project, which installs them."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What its library finds set when it is imported, where the user set nothing else."""


_MLFLOW = {
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # the lines below are of a database's first use
    # What fails is tried again by the feed, which says so; by itself MLflow would be silent for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


KINDS = {
    "wandb": TrackerKind("learner.metrics.wandb_tracker", ("wandb",), "wandb"),
    "mlflow": TrackerKind("learner.metrics.mlflow_tracker", ("mlflow", "sqlalchemy", "alembic"), "mlflow", _MLFLOW),
    "trackio": TrackerKind("learner.metrics.trackio_tracker", ("trackio",), "trackio"),
}
"""All but TensorBoard, which the learner writes itself."""


def check_installed(names: Sequence[str]) -> None:
    """Checks, without importing anything, that the trackers can be opened on this machine.

    Raises:
      ValueError: one can't; says what to install.
    """
    for name in names:
        kind = KINDS.get(name)
        missing = [p for p in kind.packages if importlib.util.find_spec(p) is None] if kind else []
        if kind and missing:
            raise ValueError(
                f"run.trackers has {name}, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                f"installed: {install_command(kind.extra)}, or leave it out"
            )


def opener(name: str, info: TrackerRunInfo) -> Callable[[], Tracker]:
    """What opens a tracker; importing its library is part of it."""

    def open_tracker() -> Tracker:
        for variable, value in KINDS[name].environment.items():
            os.environ.setdefault(variable, value)
        return importlib.import_module(KINDS[name].module).open_tracker(info)

    return open_tracker
