"""Shared-memory liveness of a child process, startup phases, and a watchdog clock.

Phases are log lines, so every process reports them in one way, however it was started.

Store heartbeats take the store's lock and wait for the disk. A process that is suspended inside a transaction blocks
the heartbeats of all others. A liveness beacon needs neither, and each process has its own. Under a cluster probe
without a parent process (`launch/supervision/kubernetes_probe.py`), the memory is a named file.
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
"""Engine processes may prefix a line with their name in parentheses."""
_OVER = "over"


def report_phase(what: str) -> None:
    """Prints the start of a phase, which lasts until the next phase or `end_phase`."""
    print(f"{_MARK}{what}", flush=True)


def end_phase() -> None:
    """Prints that the current phase is over and that no long phase follows."""
    report_phase(_OVER)


def read_phase(line: str) -> str | None:
    """Returns the phase that a log line starts, "" if it ends a phase, or None for any other line."""
    found = _LINE.match(line)
    if found is None:
        return None
    what = found[1].strip()
    return "" if what == _OVER else what


FD_VARIABLE = "SLUICE_LIVENESS_FD"
"""Environment variable with the inherited file descriptor of a watched process."""
FILE_VARIABLE = "SLUICE_LIVENESS_FILE"
"""Variable with the path of the beacon file, best in shared memory, for a watcher that is not the parent."""
BEAT_S = 1.0
_BEATS, _WORK, _DOING = 0, 8, 16
_SIZE = 24


class Activity(enum.IntEnum):
    """Current activity of a process."""

    STARTING = 0
    """Imports, restores, compiles or starts an engine: steps that may take long."""
    WORKING = 1
    WAITING = 2
    """Waits for other processes."""
    NO_ACTORS = 3
    """Learner only: waits, and no actor is live."""


@dataclasses.dataclass(frozen=True, slots=True)
class LivenessSample:
    """Reading of a liveness beacon."""

    num_beats: int
    """Beats of the beacon thread; 0 until the process has started it."""
    num_works: int
    """Progress reports of the process; rounds of waiting count."""
    activity: Activity


class Liveness:
    """Liveness beacon: the watched process beats and reports progress, and its watcher reads."""

    def __init__(self, fd: int) -> None:
        """Maps the memory behind a descriptor and closes the descriptor."""
        self._memory = mmap.mmap(fd, _SIZE)
        os.close(fd)
        self._num_works = self._get(_WORK)
        self._stop = threading.Event()

    @staticmethod
    def create() -> int:
        """Returns the descriptor of new memory for a child; make a `Liveness` of it once the child has started."""
        fd = os.memfd_create("sluice-liveness")
        os.ftruncate(fd, _SIZE)
        return fd

    @staticmethod
    def create_file(path: str) -> int:
        """Creates the memory as a file, locked for as long as this process lives, and returns its descriptor.

        Replaces the file that an earlier process left at the path.
        """
        new = f"{path}.{os.getpid()}"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, _SIZE)
        fcntl.flock(fd, fcntl.LOCK_EX)  # the mapping keeps the file open, and with it the lock
        os.replace(new, path)
        return fd

    @classmethod
    def of_this_process(cls) -> "Liveness":
        """Returns the beacon that the parent or a probe watches, if any, and hides it from child processes."""
        file, fd = os.environ.pop(FILE_VARIABLE, ""), os.environ.pop(FD_VARIABLE, "")
        if fd:
            return cls(int(fd))
        return cls(cls.create_file(file) if file else cls.create())

    @classmethod
    def read_file(cls, path: str) -> LivenessSample:
        """Reads the beacon in a file. Returns an empty sample if there is no file, or its creator has exited."""
        nothing = LivenessSample(0, 0, Activity.STARTING)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return nothing
        if os.fstat(fd).st_size < _SIZE or try_flock(fd, fcntl.LOCK_SH):
            os.close(fd)  # closing releases the lock
            return nothing
        return cls(fd).read()

    def start(self) -> None:
        """Starts the beacon thread, which beats until `stop` or until the process exits."""
        threading.Thread(target=self._beat, name="liveness", daemon=True).start()

    def stop(self) -> None:
        """Stops the beacon thread."""
        self._stop.set()

    def report(self, doing: Activity) -> None:
        """Reports progress and the current activity. Only the working thread may call it."""
        self._num_works += 1
        self._put(_DOING, doing)
        self._put(_WORK, self._num_works)

    def read(self) -> LivenessSample:
        """Returns the current reading."""
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
"""Most seconds that count between two calls of `look`."""


def watched_s(last_s: float, now_s: float, *, most_s: float = MAX_LOOK_S) -> float:
    """Returns the seconds between two looks that count: at most `most_s`, none if the clock went back."""
    return min(max(0.0, now_s - last_s), most_s)


class WatchedTime:
    """Clock that counts only the seconds in which the watcher ran.

    While the watcher is suspended, the machine sleeps or the clock is set, an unchanged beacon proves nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s, self._watched_s = clock(), 0.0

    def look(self) -> float:
        """Returns the watched seconds; call it more often than every `MAX_LOOK_S`."""
        now_s = self._clock()
        self._watched_s += watched_s(self._last_s, now_s)
        self._last_s = now_s
        return self._watched_s
