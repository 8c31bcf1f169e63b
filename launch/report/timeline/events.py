"""Reads the event log (`bridge.timeline`) a process at a time, event by event: a long run has millions."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from configs.run_folder import RunFolder

SUPERVISOR = "supervisor"
_DIGITS = re.compile(r"(\d+)")


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


def processes(folder: pathlib.Path) -> list[str]:
    """Names of the processes that a run had, learners first; one that was started again has another name (-r1)."""
    names = [path.stem for path in RunFolder(folder).events.glob("*.jsonl")]
    return sorted(
        names, key=lambda n: (not n.startswith("learner"), [int(p) if p.isdigit() else p for p in _DIGITS.split(n)])
    )


def read_process(folder: pathlib.Path, process: str) -> Iterator[Event]:
    """A process's events as it wrote them; its own start, which has no time, is left out, as are torn lines."""
    decoder = msgspec.json.Decoder(Event)
    with open(RunFolder(folder).events / f"{process}.jsonl", "rb") as lines:
        for line in lines:
            try:
                event = decoder.decode(line)
            except msgspec.MsgspecError:
                continue
            if event.ph in ("X", "i"):
                yield event
