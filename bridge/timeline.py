"""The event log: what each process did when, in Chrome's trace format (opens in Perfetto).

Every process appends whole lines to a file of its own, so a killed process loses at most the line
it was writing. `merge` joins them into one JSON object with one track a process name, over
restarts and machines (process ids repeat; names do not).
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
    """Appends one process's events; times are Unix microseconds. Safe to use from several threads."""

    def __init__(self, folder: str | os.PathLike[str], process: str) -> None:
        """Opens `folder/process.jsonl` for appending.

        Raises:
          ValueError: `process` is no plain file name.
        """
        if not process or os.path.basename(process) != process:
            raise ValueError(f"a process's name must do as a file name, got {process!r}")
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._num_lost = 0
        """Events that found no room on the disk."""
        self._file = open(path / f"{process}.jsonl", "a+b", buffering=0)  # noqa: SIM115  # open as long as the timeline
        # A predecessor killed in the middle of a line left no end to it.
        size = self._file.seek(0, os.SEEK_END)
        if size and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
            self._file.write(b"\n")
        self._write({"name": "process_name", "ph": "M", "ts": 0, "args": {"name": process}})

    def span(self, name: str, start_s: float, end_s: float, /, *, lane: int = 0, **args: Any) -> None:
        """Records something that took from `start_s` to `end_s` (Unix seconds).

        `lane` is the row inside the process's track; overlapping spans belong in different lanes.
        """
        duration_s = max(0.0, end_s - start_s)
        self._write({"name": name, "ph": "X", "ts": start_s * 1e6, "dur": duration_s * 1e6, "tid": lane, "args": args})

    def took(self, name: str, start_s: float, end_s: float, /, *, lane: int = 0, **args: Any) -> None:
        """Records something that took from `start_s` to `end_s` of `time.monotonic`, as `span` does.

        Its length does not depend on whether the machine's clock was set meanwhile.
        """
        unix_s = time.time() - time.monotonic()
        self.span(name, unix_s + start_s, unix_s + end_s, lane=lane, **args)

    def instant(self, name: str, *, time_s: float | None = None, **args: Any) -> None:
        """Records something that happened at one moment (default: now)."""
        when = time.time() if time_s is None else time_s
        self._write({"name": name, "ph": "i", "s": "p", "ts": when * 1e6, "tid": 0, "args": args})

    @contextlib.contextmanager
    def measure(self, name: str, /, *, lane: int = 0, **args: Any) -> Generator[dict[str, Any]]:
        """Records the time its block takes; entries put into the yielded dict become arguments."""
        start = time.monotonic()
        try:
            yield args
        finally:
            self.took(name, start, time.monotonic(), lane=lane, **args)

    def close(self) -> None:
        """Closes the file; what is recorded after that goes nowhere."""
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
        """Writes whole lines, in one call; False if the disk has no room for them, and then nothing of them is there.

        A full disk must not stop a run for the sake of its log.
        """
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) == len(data):
                return True
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        if not self._num_lost:
            logging.error("event log %s: no room on its disk; events are lost until there is", self._file.name)
        self._file.truncate(end)
        return False


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a folder, in order of time; a torn line of a killed process is left out.

    `pid` is the file's number, from 1 in order of name: one for each process name.

    Raises:
      ValueError: a line in the middle of a process's life is no JSON.
    """
    return sorted(_events(folder), key=lambda e: e["ts"])


def merge(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Writes `folder`'s events as one Chrome trace file, with times from the first event on.

    An event at a time, since a long run has millions: in order of processes, and in each as they were written. To be
    called when nobody writes any more: the files are read twice.

    Raises:
      ValueError: as for `read`.
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
    """Process by process, as `read` has them."""
    for track, path in enumerate(sorted(pathlib.Path(folder).glob("*.jsonl")), start=1):
        with open(path, encoding="utf-8", errors="replace") as lines:
            torn = 0
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    torn = 0
                    continue
                # Killed while writing: nothing follows, or the first line of the process that took over.
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
