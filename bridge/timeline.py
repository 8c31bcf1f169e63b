"""Event log of each process in Chrome's trace format, which Perfetto opens.

Every process appends whole lines to its own file, so a killed process loses at most its last line. `merge` joins the
files into one JSON object with one track per process name. Names are stable over restarts and machines; process ids
repeat.
"""

import contextlib
import errno
import json
import os
import pathlib
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, cast

import numpy as np
from absl import logging

from bridge.files import replace_file


class Timeline:
    """Event writer of one process. Thread-safe. The file has times in Unix microseconds."""

    def __init__(self, folder: str | os.PathLike[str], process: str) -> None:
        """Opens `folder/process.jsonl` for appending. Raises ValueError if `process` is not a plain file name."""
        if not process or os.path.basename(process) != process:
            raise ValueError(f"process name must be valid as a file name, got {process!r}")
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._num_lost = 0
        """Events lost because the disk was full."""
        self._file = open(path / f"{process}.jsonl", "a+b", buffering=0)  # noqa: SIM115  # open as long as the timeline
        # A process that was killed while it wrote left an unterminated line.
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._file.write(b"\n")
        self._write({"name": "process_name", "ph": "M", "ts": 0, "args": {"name": process}})

    def span(self, name: str, start_s: float, end_s: float, /, *, lane: int = 0, **args: Any) -> None:
        """Records an event that lasted from `start_s` to `end_s` (Unix seconds).

        `lane` is the row inside the process's track; overlapping spans need different lanes.
        """
        duration_s = max(0.0, end_s - start_s)
        self._write({"name": name, "ph": "X", "ts": start_s * 1e6, "dur": duration_s * 1e6, "tid": lane, "args": args})

    def took(self, name: str, start_s: float, end_s: float, /, *, lane: int = 0, **args: Any) -> None:
        """Records a span with times of `time.monotonic`, whose length a clock change does not affect."""
        unix_s = time.time() - time.monotonic()
        self.span(name, unix_s + start_s, unix_s + end_s, lane=lane, **args)

    def instant(self, name: str, *, time_s: float | None = None, **args: Any) -> None:
        """Records an event at one moment (default: now)."""
        when = time.time() if time_s is None else time_s
        self._write({"name": name, "ph": "i", "s": "p", "ts": when * 1e6, "tid": 0, "args": args})

    @contextlib.contextmanager
    def measure(self, name: str, /, *, lane: int = 0, **args: Any) -> Generator[dict[str, Any]]:
        """Records the time that its block takes; entries of the yielded dict become arguments."""
        start = time.monotonic()
        try:
            yield args
        finally:
            self.took(name, start, time.monotonic(), lane=lane, **args)

    def close(self) -> None:
        """Closes the file; later events are discarded."""
        with self._lock:
            self._file.close()

    def _write(self, event: Mapping[str, Any]) -> None:
        event = {**event, "pid": os.getpid()}
        try:
            line = json.dumps(event, allow_nan=False, default=_plain)
        except ValueError:
            # JSON has no NaN or infinity, and a log must not stop a run whose loss became one.
            args = {k: str(v) for k, v in event["args"].items()}
            line = json.dumps({**event, "args": args}, allow_nan=False)
        with self._lock:
            if self._file.closed:
                return
            if self._num_lost:
                lost = {"name": "events lost", "ph": "i", "s": "p", "ts": event["ts"], "tid": 0}
                line = json.dumps({**lost, "args": {"count": self._num_lost}, "pid": os.getpid()}) + "\n" + line
            if self._append(line.encode() + b"\n"):
                self._num_lost = 0
            else:
                self._num_lost += 1

    def _append(self, data: bytes) -> bool:
        """Writes whole lines; returns False, and writes nothing, if the disk is full, which must not stop a run."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) == len(data):
                return True
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        if not self._num_lost:
            logging.error("event log %s: disk full, events are discarded until space is free", self._file.name)
        self._file.truncate(end)
        return False


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns all events of a folder by time; skips the torn last line of a killed process.

    `pid` is the number of the event's file, from 1 in name order: one per process name. Raises ValueError if another
    line is not valid JSON.
    """
    return sorted(_events(folder), key=lambda e: e["ts"])


def merge(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes a folder's events as one Chrome trace file; times start at the first event. Raises ValueError as `read`.

    Call it when no process writes any more, because the files are read twice.
    """
    origin = min((e["ts"] for e in _events(folder) if e["ph"] != "M"), default=0.0)
    about = {"displayTimeUnit": "ms", "metadata": {"start_unix_s": origin / 1e6}}

    def text() -> Generator[str]:
        yield json.dumps(about)[:-1] + ', "traceEvents": ['
        separator = "\n"
        for event in _events(folder):
            if event["ph"] != "M":
                event["ts"] -= origin
            yield separator + json.dumps(event)
            separator = ",\n"
        yield "\n]}\n"

    replace_file(pathlib.Path(target), (part.encode() for part in text()))


def _events(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    for track, path in enumerate(sorted(pathlib.Path(folder).glob("*.jsonl")), start=1):
        with open(path, encoding="utf-8", errors="replace") as lines:
            torn = 0
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    torn = 0
                    continue
                # A process was killed while it wrote: the file ends, or the next process begins with `process_name`.
                if torn and '"process_name"' not in line:
                    raise ValueError(f"{path}:{torn}: not a JSON event")
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    torn = number
                    continue
                torn = 0
                yield {**event, "pid": track}


def _plain(value: Any) -> Any:
    return cast("np.generic[Any]", value).item() if isinstance(value, np.generic) else str(value)
