"""Shared-memory liveness of a child process; start-up phases; watchdog clock.

Whoever shows a run reads it there, so a process that others started says the same as one started by hand.

The store's heartbeats tell processes of each other. They take the store's lock and the disk, so a process that is
stopped inside a transaction silences them all; a liveness signal takes neither, and each process has its own. Where a
cluster watches instead of a parent (`launch/supervision/kubernetes_probe.py`), the memory has a name: a file in shared
memory.
"""

import dataclasses
import enum
import fcntl
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable

from bridge.files import try_flock

_MARK = "phase: "
_LINE = re.compile(rf"(?:\([^()]*\) )?{_MARK}(.*)")
"""What an engine's process prints may begin with who it is, in parentheses."""
_OVER = "over"


def report_phase(what: str) -> None:
    """Says what begins now, in a few words; it lasts until the next one, or until `end_phase`."""
    print(f"{_MARK}{what}", flush=True)


def end_phase() -> None:
    """Says that what was begun is done, and nothing that takes long follows."""
    report_phase(_OVER)


def read_phase(line: str) -> str | None:
    """What a line of a log says has begun; empty where something ended, None if it is any other line."""
    found = _LINE.match(line)
    if found is None:
        return None
    what = found[1].strip()
    return "" if what == _OVER else what


FD_VARIABLE = "SLUICE_LIVENESS_FD"
"""Names the inherited descriptor in the environment of a process that is watched."""
FILE_VARIABLE = "SLUICE_LIVENESS_FILE"
"""Names a file in that environment instead, for who is no parent; best in shared memory."""
BEAT_S = 1.0
_BEATS, _WORK, _DOING = 0, 8, 16
_SIZE = 24


class Activity(enum.IntEnum):
    """What a process says it does."""

    STARTING = 0
    """Imports, restores, compiles, starts an engine: steps that may take long."""
    WORKING = 1
    WAITING = 2
    """For others, by its own will."""
    NO_ACTORS = 3
    """A learner's: it waits, and no actor lives."""


@dataclasses.dataclass(frozen=True, slots=True)
class LivenessSample:
    """What is felt of a process at one moment."""

    num_beats: int
    """By a thread that does nothing else; 0 until the process has come to it."""
    num_works: int
    """Parts of its work that the process has done, rounds of waiting among them."""
    activity: Activity


class Liveness:
    """Both ends of a liveness signal: one process beats and works, the one that started it feels."""

    def __init__(self, fd: int) -> None:
        """Over a descriptor from `create` or of the parent's; it is closed, the memory stays."""
        self._memory = mmap.mmap(fd, _SIZE)
        os.close(fd)
        self._num_works = self._get(_WORK)
        self._stop = threading.Event()

    @staticmethod
    def create() -> int:
        """A descriptor of new memory, to be inherited; the caller makes a `Liveness` of it once it was."""
        fd = os.memfd_create("sluice-liveness")
        os.ftruncate(fd, _SIZE)
        return fd

    @staticmethod
    def create_file(path: str) -> int:
        """The same as a file that others find; it is this process's, and locked, for as long as this process lives.

        One of that name, which a process before this one left, is replaced.
        """
        new = f"{path}.{os.getpid()}"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, _SIZE)
        fcntl.flock(fd, fcntl.LOCK_EX)  # the mapping keeps the descriptor's file open, and with it the lock
        os.replace(new, path)
        return fd

    @classmethod
    def of_this_process(cls) -> "Liveness":
        """The one that the parent or a probe feels; where nobody does, as in one started by hand, it beats for nobody.

        Processes that this one starts don't inherit either name: the signal is its own.
        """
        file, fd = os.environ.pop(FILE_VARIABLE, ""), os.environ.pop(FD_VARIABLE, "")
        if fd:
            return cls(int(fd))
        return cls(cls.create_file(file) if file else cls.create())

    @classmethod
    def read_file(cls, path: str) -> LivenessSample:
        """What there is to feel of the process that made a file; nothing yet if there is none, or its maker is gone."""
        nothing = LivenessSample(0, 0, Activity.STARTING)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return nothing
        if os.fstat(fd).st_size < _SIZE or try_flock(fd, fcntl.LOCK_SH):
            os.close(fd)  # and lets go of the lock
            return nothing
        return cls(fd).read()

    def start(self) -> None:
        """Beats from here on, for as long as the process lives and is not stopped."""
        threading.Thread(target=self._beat, name="liveness", daemon=True).start()

    def stop(self) -> None:
        """Beats no more."""
        self._stop.set()

    def report(self, doing: Activity) -> None:
        """Says that a part of the work is done, and what is done now; called by the thread whose work it is."""
        self._num_works += 1
        self._put(_DOING, doing)
        self._put(_WORK, self._num_works)

    def read(self) -> LivenessSample:
        """What there is to feel now."""
        return LivenessSample(self._get(_BEATS), self._get(_WORK), Activity(self._get(_DOING)))

    def _beat(self) -> None:
        num_beats = self._get(_BEATS)
        while True:
            num_beats += 1
            self._put(_BEATS, num_beats)
            if self._stop.wait(BEAT_S):
                return

    # Eight aligned bytes are read and written at once, so no lock is needed.
    def _get(self, offset: int) -> int:
        return struct.unpack_from("=q", self._memory, offset)[0]

    def _put(self, offset: int, value: int) -> None:
        struct.pack_into("=q", self._memory, offset, value)


MAX_LOOK_S = 1.0
"""The time between two looks counts as no more than this."""


class WatchedTime:
    """Seconds for which somebody has watched.

    While the watcher is stopped himself, the machine is suspended or the clock is set, nobody watches, and what did not
    change meanwhile is no sign of anything.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_look_s: float = MAX_LOOK_S,
        before: tuple[float, float] | None = None,
    ) -> None:
        """Starts at 0, or goes on from the `state` of one before, of the same clock."""
        self._clock = clock
        self._max_look_s = max_look_s
        self._last_s, self._watched_s = before or (clock(), 0.0)

    @property
    def state(self) -> tuple[float, float]:
        """When it last looked, by its clock, and what the time was then."""
        return self._last_s, self._watched_s

    def look(self) -> float:
        """The time at this look, in seconds; look more often than every `max_look_s`."""
        now_s = self._clock()
        self._watched_s += min(max(0.0, now_s - self._last_s), self._max_look_s)
        self._last_s = now_s
        return self._watched_s
