"""Reader of event logs, process lifetimes and supervisor events."""

import bisect
import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from configs.run_folder import RunFolder
from launch.tools.samples.samples_view import visible

SUPERVISOR = "supervisor"
_DIGITS = re.compile(r"(\d+)")
_MAX_US = 1e16
"""Largest plausible timestamp (the year 2286), in microseconds; damaged files contain larger ones."""
_TAIL_BYTES = 1 << 16
"""Bytes read from the end of a file, enough for many events; events are written when they end."""


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
        """Start, Unix time in seconds."""
        return self.ts / 1e6

    @property
    def end_s(self) -> float:
        """End, Unix time in seconds."""
        return (self.ts + self.dur) / 1e6

    @property
    def is_span(self) -> bool:
        """True if the event has a duration."""
        return self.ph == "X"

    def number(self, name: str) -> int | None:
        """Returns an integer argument; None if it is missing or not an integer."""
        value = self.args.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def processes(folder: pathlib.Path) -> list[str]:
    """Returns the names of a run's processes, learners first; a restarted actor has another name (-r1)."""
    names = [path.stem for path in RunFolder(folder).events.glob("*.jsonl") if path.is_file()]
    return sorted(
        names, key=lambda n: (not n.startswith("learner"), [int(p) if p.isdigit() else p for p in _DIGITS.split(n)])
    )


def role_of(process: str) -> tuple[str, int]:
    """Returns (role, number of restarts) of a process by its name, such as ("actor-0", 1) for actor-0-r1."""
    role, sep, restart = process.rpartition("-r")
    return (role, int(restart)) if sep and restart.isdecimal() else (process, 0)


def read_process(folder: pathlib.Path, process: str) -> Iterator[Event]:
    """Yields a process's events in file order, without incomplete lines and untimed metadata."""
    with open(_file(folder, process), "rb") as lines:
        yield from _events(lines)


def extent(folder: pathlib.Path) -> tuple[float, float] | None:
    """Returns the times of the first and last event of any process, Unix time; None without events."""
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
    """Returns the size of all event logs together, in bytes."""
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


def supervisor_message(event: Event) -> tuple[str, str]:
    """Returns the message of a supervisor event and its detail, as safe text.

    After a kill by signal, the last log line is shown separately, because it is not the cause.
    """
    if event.name == "message":
        return visible(str(event.args.get("line", ""))), ""
    process, how, cause, *end = (str(event.args.get(n, "")) for n in ("process", "how", "cause", "note", "then"))
    if event.number("signal"):
        return visible(f"{process} {how}{''.join(end)}"), visible(f"its last line was: {cause}") if cause else ""
    return visible(f"{process} {how}{f': {cause}' if cause else ''}{''.join(end)}"), ""


Life = tuple[float, float]
"""Start and end, Unix time in seconds."""


@dataclasses.dataclass
class ProcessRecord:
    """Supervisor events of one process; Unix times in order."""

    bounds: list[float] = dataclasses.field(default_factory=list[float])
    """Times that separate two lives of the process."""
    starts: set[float] = dataclasses.field(default_factory=set[float])
    """The `bounds` at which a life begins."""
    ends: list[float] = dataclasses.field(default_factory=list[float])


def known_of(supervisor: Iterable[Event]) -> dict[str, ProcessRecord]:
    """Returns the record per process, over all starts of the supervisor."""
    found: dict[str, ProcessRecord] = {}
    alive: set[str] = set()
    for event in sorted(supervisor, key=lambda e: e.ts):
        match event.name:
            case "start":
                name = str(event.args.get("process", ""))
                if name in alive and name.startswith("learner"):
                    # A killed supervisor logs no exits and takes its processes with it, so this is a new supervisor.
                    for other in alive - {name}:
                        found[other].bounds.append(event.start_s)
                    alive.clear()
                known = found.setdefault(name, ProcessRecord())
                known.bounds.append(event.start_s)
                known.starts.add(event.start_s)
                alive.add(name)
            case "exit" if (name := str(event.args.get("process", ""))) in alive:
                found[name].ends.append(event.start_s)
                alive.remove(name)
            case "end":
                for name in alive:
                    found[name].ends.append(event.start_s)
                alive.clear()
            case _:
                pass
    return found


class ProcessLifetime:
    """Lifetimes of a process, collected from its events; `known` is None for a process without a supervisor."""

    def __init__(self, known: ProcessRecord | None = None) -> None:
        self._known = known or ProcessRecord()
        self._seen: dict[int, Life] = {}
        self._left_s: dict[int, float] = {}

    def add(self, event: Event) -> None:
        """Adds an event of the process, in any order."""
        i = bisect.bisect_right(self._known.bounds, event.start_s)
        first_s, last_s = self._seen.get(i, (event.start_s, event.end_s))
        self._seen[i] = (min(first_s, event.start_s), max(last_s, event.end_s))
        if event.name == "shutdown":
            self._left_s[i] = max(self._left_s.get(i, 0.0), event.end_s)

    def lives(self, *, recent_s: float, run_end_s: float) -> list[Life]:
        """Returns the lifetimes of the process in order.

        A life without a known end lasts until the end of the run if a supervisor would have recorded its exit, or if
        the process wrote an event after `recent_s`. Otherwise it ends with its last event.
        """
        bounds = self._known.bounds
        found: list[Life] = []
        for i in range(len(bounds) + 1):
            seen = self._seen.get(i)
            is_started = i > 0 and bounds[i - 1] in self._known.starts
            if seen is None and not is_started:
                continue
            begin_s = bounds[i - 1] if is_started else seen[0] if seen else 0.0
            last_s = seen[1] if seen else begin_s
            limit_s = bounds[i] if i < len(bounds) else float("inf")
            ends = [end for end in self._known.ends if begin_s <= end <= limit_s]
            if ends:
                end_s = max(last_s, ends[0])
            elif i < len(bounds) or self._left_s.get(i, -1.0) >= last_s:
                end_s = last_s
            elif is_started or last_s >= recent_s:
                end_s = max(last_s, run_end_s)
            else:
                end_s = last_s
            found.append((begin_s, end_s))
        return found
