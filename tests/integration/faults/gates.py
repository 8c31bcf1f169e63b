"""Gates: places in a process's work at which a bench holds it, so that a fault surely falls into that phase.

A gate is shut by the bench (`Gates.shut`), by a file named after the process. The process, which runs its command
with its phases wrapped (`watched_actor`, `watched_learner`), finds the file when it comes there, renames it and stands
still in that very place, one thread of it, until the bench lets it go on (`Gates.open`), or kills it. Nothing of this
is in the product: without a file a gate costs one look for it.
"""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable

FOLDER, PROCESS = "FAULTS_GATES", "FAULTS_PROCESS"
"""Environment variables of a watched process: where the files are, and its name."""
HOLD_S = 20.0
"""How long a process stands still at most: a bench that is gone must not hold it for ever."""
_LOOK_S = 0.002

_offset_s = 0.0


def reach(phase: str, moment: str) -> str:
    """Called by a watched process at each gate; returns what it is told to do there, mostly nothing.

    `clock SECONDS` is done here: from then on `time.time` of this process is so far ahead.
    """
    file = pathlib.Path(os.environ[FOLDER]) / os.environ[PROCESS]
    try:
        if file.read_text() != f"{phase} {moment}":
            return ""
        os.rename(file, held := file.with_suffix(".held"))  # one thread of all that come gets it
    except FileNotFoundError:
        return ""
    end_s = time.monotonic() + HOLD_S
    while held.exists() and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    told = ""
    with contextlib.suppress(FileNotFoundError):
        file = file.with_suffix(".told")
        told = file.read_text()
        file.unlink()
    if told.startswith("clock "):
        _shift_clock(float(told.split()[1]))
    return told


def _shift_clock(seconds: float) -> None:
    global _offset_s
    if _offset_s == 0.0:
        real: Callable[[], float] = time.time
        time.time = lambda: real() + _offset_s
    _offset_s += seconds


class Gates:
    """The bench's side."""

    def __init__(self, folder: pathlib.Path) -> None:
        """All open."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def environment(self, process: str) -> dict[str, str]:
        """What a watched process of that name finds in its environment."""
        return {FOLDER: str(self.folder), PROCESS: process}

    def shut(self, process: str, phase: str, moment: str) -> None:
        """From here on the process stands still when it comes there."""
        part = self.folder / f"{process}.part"
        part.write_text(f"{phase} {moment}")
        part.replace(self.folder / process)

    def move_on(self, process: str, phase: str, moment: str) -> None:
        """Lets it go on to the next gate, which is shut before it does."""
        self.shut(process, phase, moment)
        (self.folder / f"{process}.held").unlink(missing_ok=True)

    def holds(self, process: str) -> bool:
        """Whether it stands there."""
        return (self.folder / f"{process}.held").exists()

    def open(self, process: str, told: str = "") -> None:
        """Lets it go on, and tells it what to do; where none stands there any more, none will."""
        if told:
            (self.folder / f"{process}.told").write_text(told)
        for file in (self.folder / process, self.folder / f"{process}.held"):
            file.unlink(missing_ok=True)

    def forget(self, process: str) -> None:
        """The process is gone: nobody stands there. A gate that is shut stays so for the next one of its name."""
        for suffix in (".held", ".told"):
            (self.folder / process).with_suffix(suffix).unlink(missing_ok=True)
