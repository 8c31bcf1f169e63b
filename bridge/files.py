"""Locks that die with their holder, and files that others see whole or not at all."""

import contextlib
import fcntl
import os
import pathlib
import time
import uuid
from collections.abc import Iterable

_PART = ".sluice-part"
_PROBE_BYTES = 4096
_ABANDONED_S = 3600.0  # a small file is written in seconds


def try_flock(fd: int, operation: int) -> bool:
    """Takes a lock if nobody is in the way; the kernel drops it when its holder dies."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def replace_file(path: pathlib.Path, data: bytes | Iterable[bytes], *, is_durable: bool = False) -> None:
    """Writes a small file so that others see the old one or the new one, whole; `is_durable` waits for the disk.

    `data` may come in parts.
    """
    _sweep(path.parent)
    # A name of our own: several processes may open one run folder, and write its files, at once; those of containers on
    # several machines may all have the same id.
    part = _part_of(path)
    try:
        with open(part, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def try_replace_file(path: pathlib.Path) -> None:
    """Tries whether `replace_file` could write a file, which stays as it is.

    Raises:
      OSError: it could not.
    """
    part = _part_of(path)
    try:
        part.write_bytes(bytes(_PROBE_BYTES))
    finally:
        part.unlink(missing_ok=True)


def _part_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PART}")


def _sweep(folder: pathlib.Path) -> None:
    """Removes what killed writers left in a folder.

    By age, not by the writer's id: it may be of another machine that shares the folder, and ids come again.
    """
    for part in folder.glob(f".*{_PART}"):
        with contextlib.suppress(OSError):  # somebody else swept it, or it is another user's
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()
