"""Locks that die with their holder, and files that others see whole or not at all."""

import fcntl
import os
import pathlib


def try_flock(fd: int, operation: int) -> bool:
    """Takes a lock if nobody is in the way; the kernel drops it when its holder dies."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def replace_file(path: pathlib.Path, data: bytes, *, is_durable: bool = False) -> None:
    """Writes a small file so that others see the old one or the new one, whole; `is_durable` waits for the disk."""
    part = path.with_name(f".{path.name}.{os.getpid()}")  # a name of our own: others may replace the file meanwhile
    try:
        with open(part, "wb") as file:
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
