"""Who is at work: a file for each piece of work, named by its process, so that a kill knows what it hits."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator

FOLDER = "REWARD_KILLS_BUSY"
"""Environment variable: where the files are."""


def begin() -> pathlib.Path:
    """This process, in this thread, works from here on until the file is taken away."""
    path = pathlib.Path(os.environ[FOLDER]) / f"{os.getpid()}.{threading.get_ident()}"
    path.touch()
    return path


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Works within the context."""
    path = begin()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def take(folder: pathlib.Path, pid: int) -> bool:
    """Whether a process was at work; forgets it."""
    found = list(folder.glob(f"{pid}.*"))
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)


def is_busy(folder: pathlib.Path, pid: int) -> bool:
    """Whether a process is at work."""
    return any(folder.glob(f"{pid}.*"))
