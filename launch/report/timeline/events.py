"""Reads the event log (`bridge.timeline`) a process at a time, event by event: a long run has millions."""

import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from configs.run_folder import RunFolder

SUPERVISOR = "supervisor"
_DIGITS = re.compile(r"(\d+)")
_MAX_US = 1e16
"""Times beyond it (the year 2286) are no times; a damaged file has them."""
_TAIL_BYTES = 1 << 16
"""Of a file's end: more than many events, which are written as they end."""


class Event(msgspec.Struct, frozen=True):
    """An event of Chrome's trace format; times in microseconds since 1970."""

    name: str
    ph: str
    ts: float
    dur: float = 0.0
    tid: int = 0
    args: dict[str, Any] = {}

    @property
    def start_s(self) -> float:
        """Unix time."""
        return self.ts / 1e6

    @property
    def end_s(self) -> float:
        """Unix time."""
        return (self.ts + self.dur) / 1e6

    @property
    def is_span(self) -> bool:
        """Whether it took time."""
        return self.ph == "X"

    def number(self, name: str) -> int | None:
        """An argument that is a whole number; None where it is none."""
        value = self.args.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def processes(folder: pathlib.Path) -> list[str]:
    """Names of the processes that a run had, learners first; one that was started again has another name (-r1)."""
    names = [path.stem for path in RunFolder(folder).events.glob("*.jsonl") if path.is_file()]
    return sorted(
        names, key=lambda n: (not n.startswith("learner"), [int(p) if p.isdigit() else p for p in _DIGITS.split(n)])
    )


def read_process(folder: pathlib.Path, process: str) -> Iterator[Event]:
    """A process's events as it wrote them; its own start, which has no time, is left out, as are torn lines."""
    with open(_file(folder, process), "rb") as lines:
        yield from _events(lines)


def extent(folder: pathlib.Path) -> tuple[float, float] | None:
    """When the first and the last event of any process was, Unix time; None where there is none."""
    firsts: list[float] = []
    lasts: list[float] = []
    for process in processes(folder):
        firsts += [e.start_s for e in itertools.islice(read_process(folder, process), 1)]
        with open(_file(folder, process), "rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - _TAIL_BYTES))
            lasts += [e.end_s for e in _events(lines)]
    return (min(firsts), max(lasts)) if firsts and lasts else None


def num_bytes(folder: pathlib.Path) -> int:
    """Of all of the event log."""
    return sum(_file(folder, process).stat().st_size for process in processes(folder))


def _file(folder: pathlib.Path, process: str) -> pathlib.Path:
    return RunFolder(folder).events / f"{process}.jsonl"


def _events(lines: Iterable[bytes]) -> Iterator[Event]:
    decoder = msgspec.json.Decoder(Event)
    for line in lines:
        try:
            event = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if event.ph in ("X", "i") and 0 <= event.ts < _MAX_US and 0 <= event.dur < _MAX_US:
            yield event
