"""Feed of metrics.jsonl rows to a tracker (`learner.metrics.tracker_kinds`).

Rows that a tracker does not accept stay in metrics.jsonl, the record, until it does or until the next start. A small
file (`SentSteps`) records which steps a tracker has. Steps that a restarted learner repeats are not sent again, because
no tracker can retract values: it keeps those of the abandoned branch, which are also in metrics.abandoned.jsonl.
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

from absl import logging

from bridge.files import replace_file
from configs.custom_functions import first_line
from learner.metrics.metric_names import FAMILIES, METRICS, meaning

Row = Mapping[str, Any]
"""Row of metrics.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackerRunInfo:
    """Information about a run that opens a tracker."""

    run: str
    """Id of the run; a restarted learner keeps it."""
    name: str
    """Name of the run; not unique."""
    project: str
    config: Mapping[str, Any]
    folder: pathlib.Path
    """Local folder for the tracker's files, unless the tracker's environment sets another; the tracker creates it."""


class Tracker(Protocol):
    """Open run of a tracker, used by one thread of a separate process."""

    where: str
    """URL or command that shows the run; empty if unknown."""
    is_sure_when_closed: bool
    """True if sent rows stay in this process's memory and are safe only after `close` returns."""

    def send(self, rows: Sequence[Row]) -> None:
        """Sends rows, oldest first. After any exception the caller sends them again."""
        ...

    def close(self) -> None:
        """Flushes pending rows; may block indefinitely, so callers bound it."""
        ...


def scalars(row: Row) -> dict[str, float]:
    """Returns the metrics of a row that have a value."""
    return {name: float(value) for name, value in row.items() if value is not None and meaning(name) is not None}


def written_s(row: Row) -> float:
    """Returns the time at which a row was written, in Unix seconds; the current time if the row lacks it."""
    return row.get("time_s") or time.time()


def meanings() -> dict[str, str]:
    """Returns unit and meaning of all metrics by name, and of families by pattern."""
    return METRICS | FAMILIES


def table() -> str:
    """Returns `meanings` as a Markdown table."""
    rows = [f"| `{name}` | {said} |" for name, said in meanings().items()]
    return "\n".join(["| metric | unit and meaning |", "|---|---|", *rows])


MAX_ROWS = 200
"""Maximum rows per request."""
POLL_S = 1.0
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 120.0
"""First and maximum pause between retries, in seconds; doubles after each failure."""


class TrackerRefusedError(Exception):
    """Failure of a tracker that is not retried."""


class UnsureError(Exception):
    """Possible loss of rows that a tracker accepted."""


@dataclasses.dataclass
class SentSteps:
    """Progress of a tracker, stored in its own file."""

    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    """Last sent step by kind of row; the steps of a kind increase."""
    num_sent: int = 0
    num_unsure: int = 0
    """Rows that were sent and may be lost because the process was killed or the tracker failed to close. They are not
    sent again. For a tracker with `Tracker.is_sure_when_closed`, all rows of the current start count until it is
    closed."""
    num_left: int = 0
    """Rows not accepted at the end of the last start."""
    where: str = ""
    """Value of `Tracker.where`."""
    problem: str = ""
    """Reason of the last failure; empty after a success."""

    @classmethod
    def read(cls, path: pathlib.Path) -> "SentSteps":
        """Reads the file, or returns a new object if it does not exist; raises ValueError if it is invalid."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError) as e:
            raise ValueError(
                f"{path} is not a valid tracker progress file ({e}); remove it to send all rows again"
            ) from e

    def write(self, path: pathlib.Path) -> None:
        """Writes the file atomically."""
        replace_file(path, (json.dumps(dataclasses.asdict(self), indent=2) + "\n").encode())


class TrackerFeed:
    """Reader that follows the record and sends its rows to one tracker."""

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
        """Reads the marks, or raises ValueError if they are invalid; does not open the tracker.

        Args:
          record: path of metrics.jsonl; may not exist yet.
          marks: path of the `SentSteps` file, written only by this feed.
          open_tracker: called until it succeeds.
          wait: waits for the given seconds, or less if there may be new rows.
          name: name of the tracker, for log lines.
          is_patient: True to retry failures indefinitely.
        """
        self._record, self._path, self._open, self._wait, self._name = record, marks, open_tracker, wait, name
        self.marks = SentSteps.read(marks)
        if self.marks.num_unsure:
            logging.warning(
                "%s: %d sent rows may be missing, because the tracker's process exited before they were stored",
                name,
                self.marks.num_unsure,
            )
        self._file: BinaryIO | None = None
        self._waiting: list[dict[str, Any]] = []
        """Rows read and not sent, at most `MAX_ROWS`."""
        self._tracker: Tracker | None = None
        self._num_taken = 0
        """Rows accepted since the tracker was opened."""
        self._num_failures = 0
        self._is_patient = is_patient

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Sends existing and new rows until `is_over` returns True and all rows are sent; then closes the tracker.

        Blocks as long as the tracker accepts nothing; the caller sets the limit (`give_up`). Raises TrackerRefusedError
        if sending failed and the feed is not patient, and UnsureError as `close`.
        """
        while True:
            was_over = is_over()  # checked before reading, so that rows written before the end are read
            self._waiting = self._waiting or self._read()
            if self._waiting:
                self._deliver()
            elif was_over:
                break
            else:
                self._wait(POLL_S)
        self.close()

    def close(self) -> None:
        """Closes the tracker and records possibly missing rows; if not patient, raises UnsureError on failure."""
        self._note(num_left=0)
        if self._tracker is None:
            return
        tracker, self._tracker = self._tracker, None
        try:
            tracker.close()
        except Exception as e:  # a tracker library may raise anything
            self._did_not_close(e)
        else:
            self._note(num_unsure=0)

    def give_up(self) -> int:
        """Records and returns the number of unsent rows; any thread may call it while `follow` hangs in the tracker."""
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
            # Recorded before sending: a step sent twice is permanently wrong, while a lost one is only missing.
            self._note(
                sent=before | {row["kind"]: row["step"] for row in rows}, num_unsure=self._num_in_memory + len(rows)
            )
            self._tracker.send(rows)
        except Exception as e:  # a tracker library may raise anything
            self._failed(e, before)
            return
        self._num_taken += len(rows)
        self._note(num_unsure=self._num_in_memory, num_sent=self.marks.num_sent + len(rows), problem="")
        if self._num_failures:
            logging.info("%s: reached again", self._name)
        self._num_failures, self._waiting = 0, []

    def _failed(self, error: Exception, sent: dict[str, int]) -> None:
        problem = first_line(error)[:300]
        if problem != self.marks.problem and self._is_patient:
            logging.error("%s takes no metrics: %s; they wait in %s", self._name, problem, self._record)
        self._note(sent=sent, num_unsure=self._num_in_memory, problem=problem)
        if not self._is_patient:
            raise TrackerRefusedError(f"{self._name} takes no metrics: {problem}") from error
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 30), MAX_PAUSE_S)
        self._num_failures += 1
        self._wait(pause_s)

    def _did_not_close(self, error: Exception) -> None:
        problem = first_line(error)[:300]
        self._note(num_unsure=self._num_taken, problem=problem)
        said = f"{self._name} failed to close: {problem}; {self._num_taken} rows of this start may be missing"
        if not self._is_patient:
            raise UnsureError(said) from error
        logging.error("%s", said)

    @property
    def _num_in_memory(self) -> int:
        """Accepted rows that would be lost with this process."""
        return self._num_taken if self._tracker is not None and self._tracker.is_sure_when_closed else 0

    def _note(self, **fields: Any) -> None:
        marks = dataclasses.replace(self.marks, **fields)
        if marks != self.marks:
            marks.write(self._path)
            self.marks = marks

    def _has(self, row: dict[str, Any]) -> bool:
        """Returns True if the tracker has the row, or the row has no metrics."""
        return row["step"] <= self.marks.sent.get(row["kind"], -1) or not scalars(row)

    def _read(self) -> list[dict[str, Any]]:
        """Returns the next unsent rows, oldest first."""
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


def _whole_lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yields rows from the file's position; stops before an incomplete line."""
    while line := file.readline():
        if not line.endswith(b"\n"):
            file.seek(-len(line), 1)
            return
        yield json.loads(line)
