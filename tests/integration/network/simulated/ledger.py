"""What a simulated learner has trained: one line a group, on disk before the store may forget it."""

import dataclasses
import errno
import json
import os
import pathlib
from collections import Counter
from collections.abc import Iterable

from bridge.store.protocol import StoredGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A trained group."""

    ticket: str
    seq: int
    actor: str
    min_step: int
    max_step: int
    trained_s: float
    """Unix time."""


class Ledger:
    """A file of lines, each written at once; a restarted learner goes on behind them."""

    def __init__(self, path: pathlib.Path) -> None:
        """Opens or makes the file; a line that a killed learner did not end is taken away."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        whole = path.read_bytes().rpartition(b"\n")
        os.ftruncate(self._fd, len(whole[0]) + len(whole[1]))
        self.tickets = {e.ticket for e in read(path)}

    def add(self, groups: Iterable[StoredGroup], *, now_s: float) -> None:
        """Writes groups that are not there yet; they are on disk when it returns.

        Raises:
          OSError: the disk is full; none of them is there.
        """
        lines: list[bytes] = []
        new: set[str] = set()
        for stored in groups:
            group = stored.group
            if group.ticket_id in self.tickets | new:
                continue
            new.add(group.ticket_id)
            entry = Entry(group.ticket_id, stored.seq, group.actor, group.min_step, group.max_step, now_s)
            lines.append(json.dumps(dataclasses.asdict(entry)).encode() + b"\n")
        if lines:
            self._append(b"".join(lines))
            self.tickets |= new

    def _append(self, data: bytes) -> None:
        end = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, end)
            raise

    def close(self) -> None:
        os.close(self._fd)


def read(path: pathlib.Path) -> list[Entry]:
    """All that was written so far; a line that is being written is none yet."""
    if not path.exists():
        return []
    return [Entry(**json.loads(line)) for line in path.read_bytes().split(b"\n")[:-1]]


def count(path: pathlib.Path) -> int:
    """How many lines were written so far."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_exactly_once(entries: Iterable[Entry], wanted: Iterable[str]) -> None:
    """Asserts that each wanted ticket is there once and nothing else is."""
    counts = Counter(e.ticket for e in entries)
    assert {t: n for t, n in counts.items() if n > 1} == {}, "trained twice"
    assert set(wanted) - set(counts) == set(), "lost"
    assert set(counts) - set(wanted) == set(), "never asked for"
