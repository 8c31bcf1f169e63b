"""Atomic file writes, file locks, the run lock and weight digests.

A file lock has no effect on other machines. Across machines the learner's lease in the store protects a run, and its
owner is `lock_owner`.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import platform
import stat
import time
import uuid
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

_PART = ".sluice-part"
_PROBE_BYTES = 4096
_ABANDONED_S = 3600.0  # a small file is written in seconds


def first_line(error: BaseException, *, max_chars: int = 300) -> str:
    """Returns an error's first line (libraries append whole requests to it), or its type if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:max_chars]


def try_flock(fd: int, operation: int) -> bool:
    """Takes a file lock without waiting; returns False if it is held. The kernel releases it when the holder dies."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_private_folder(folder: pathlib.Path) -> None:
    """Creates a folder that only this user can enter, or removes other users' access to an existing one.

    Raises ValueError if another user owns the folder, others can write to it, or the path is a link or a file.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not _is_own(found, stat.S_IFDIR) or found.st_mode & 0o022:
        raise ValueError(f"{folder}: other users can write to it; remove it, or choose another folder for snapshots")
    if found.st_mode & 0o055:
        folder.chmod(0o700)


def is_own_folder(folder: pathlib.Path) -> bool:
    """Returns True if the path is a folder, not a link to one, and this user owns it."""
    try:
        return _is_own(folder.lstat(), stat.S_IFDIR)
    except FileNotFoundError:
        return False


def open_own(path: pathlib.Path, flags: int) -> int:
    """Opens a regular file of this user; with `os.O_CREAT`, a missing file is created for this user only.

    Raises ValueError if another user owns the file, or the path is a link or not a regular file.
    """
    refusal = ValueError(f"{path} is not this user's own file: remove it, or choose another place for snapshots")
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as e:
        # In a sticky folder the kernel itself refuses to open another user's file (fs.protected_regular).
        if e.errno in (errno.ELOOP, errno.EACCES, errno.ENXIO, errno.EISDIR):
            raise refusal from e
        raise
    if not _is_own(os.fstat(fd), stat.S_IFREG):
        os.close(fd)
        raise refusal
    return fd


def _is_own(found: os.stat_result, kind: int) -> bool:
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid()


def flush(path: pathlib.Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(
    path: pathlib.Path, data: bytes | Iterable[bytes], *, is_durable: bool = False, mode: int | None = None
) -> None:
    """Replaces a small file atomically: readers see the old or the new content.

    With `is_durable`, the content is flushed to disk before the rename. `mode` is the new
    file's permissions, whatever the umask.
    """
    _sweep(path.parent)
    # A random name: several processes may write the files of one run folder concurrently, and process ids of containers
    # on several machines may be equal.
    part = _part_of(path)
    try:
        with open(
            part, "wb", opener=lambda name, flags: os.open(name, flags, 0o666 if mode is None else 0o600)
        ) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.writelines([data] if isinstance(data, bytes) else data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def try_replace_file(path: pathlib.Path) -> None:
    """Raises OSError if `replace_file` could not write the file, which stays unchanged."""
    part = _part_of(path)
    try:
        part.write_bytes(bytes(_PROBE_BYTES))
    finally:
        part.unlink(missing_ok=True)


def _part_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{_PART}")


def _sweep(folder: pathlib.Path) -> None:
    """Removes files of killed writers, by age: a writer may run on another machine, and process ids repeat."""
    for part in folder.glob(f".*{_PART}"):
        with contextlib.suppress(OSError):  # another process removed it, or another user owns it
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


class RunLock:
    """Exclusive lock on a run folder, held until `release` or until the process exits."""

    def __init__(self, file: pathlib.Path, role: str) -> None:
        """Acquires the lock. Raises ValueError if a live process holds the lock."""
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_flock(self._fd, fcntl.LOCK_EX):
            os.close(self._fd)
            raise ValueError(
                f"{file.parent} is locked by a running {role}; wait for it to exit, or set another --config.run.dir"
            )

    def release(self) -> None:
        """Releases the lock; has no effect if it was released before."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_owner(folder: pathlib.Path) -> str:
    """Returns an id of a run folder that is unique across machines.

    Processes with equal ids share file locks; different ids prove nothing. The id contains the folder's inode, because
    containers of one image share the machine id, and cloned machines share both host name and machine id.
    """
    machine = pathlib.Path("/etc/machine-id")
    machine_id = machine.read_text().strip() if machine.is_file() else ""
    folder = folder.resolve()
    return f"{platform.node()}/{machine_id}:{folder}#{folder.stat().st_ino}"


BASE_FILE = "lora_base.json"
"""File name in the run card for the digest of the base weights that published adapters belong to."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def weights_digest(folder: pathlib.Path) -> str:
    """Returns the hex BLAKE3 of a folder's safetensors names and contents. Raises ValueError if a file is missing."""
    digest = blake3()
    for path in weight_files(folder):
        if path.parent != folder or not path.is_file():
            raise ValueError(f"{folder} has no weights: {path.name} is missing")
        digest.update(f"{path.name} {blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()}\n".encode())
    return digest.hexdigest()


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of the folder's safetensors files, from its index if it has one. They may not exist."""
    index = folder / _INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_SINGLE]
    return [folder / name for name in names]


def json_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSONL file, none if it is missing; skips other lines, such as one cut off by a kill."""
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            found += [value] if isinstance(value, dict) else []
    return found
