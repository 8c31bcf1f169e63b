"""Atomic writes, file locks, the run lock, the digest of weights.

A lock says nothing to other machines; there the store's lead does, held by a place (`place_of`).
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

from blake3 import blake3

_PART = ".sluice-part"
_PROBE_BYTES = 4096
_ABANDONED_S = 3600.0  # a small file is written in seconds


def first_line(error: BaseException, *, max_chars: int = 300) -> str:
    """Returns the first line of what an error says, or its type: libraries add a whole request or history to it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:max_chars]


def try_flock(fd: int, operation: int) -> bool:
    """Takes a lock if nobody is in the way; the kernel drops it when its holder dies."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make_private_folder(folder: pathlib.Path) -> None:
    """Makes a folder that only this user can enter, or checks that an existing one is such a folder.

    A folder of this user that others can enter but not write to is closed to them.

    Raises:
      ValueError: another user owns the folder, others can write to it, or the path is a link or a file.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not _is_own(found, stat.S_IFDIR) or found.st_mode & 0o022:
        raise ValueError(f"{folder} is not this user's alone: remove it, or choose another place for snapshots")
    if found.st_mode & 0o055:
        folder.chmod(0o700)


def is_own_folder(folder: pathlib.Path) -> bool:
    """Returns True if the path is a folder, not a link to one, and this user owns it."""
    try:
        return _is_own(folder.lstat(), stat.S_IFDIR)
    except FileNotFoundError:
        return False


def open_own(path: pathlib.Path, flags: int) -> int:
    """Opens a regular file of this user and returns its descriptor; with `os.O_CREAT` it is made for this user alone.

    Raises:
      FileNotFoundError: there is no such file, and `flags` do not ask to make it.
      ValueError: another user owns the file, or the path is a link or no regular file.
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
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


class RunLock:
    """Held from when it is made until it is released, or its process ends."""

    def __init__(self, file: pathlib.Path, role: str) -> None:
        """Takes the lock.

        Raises:
          ValueError: a live process holds it.
        """
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_flock(self._fd, fcntl.LOCK_EX):
            os.close(self._fd)
            raise ValueError(
                f"a live {role} runs in {file.parent}; wait for its end, or choose another --config.run.dir"
            )

    def release(self) -> None:
        """Lets the next one in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_owner(folder: pathlib.Path) -> str:
    """Where a run's folder lies in the world: two places differ where a lock in one is no lock in the other.

    Rather too many differ than too few: containers of one image share the machine's id, clones of a machine both name
    and id, so the folder's own number on its disk is in it too.
    """
    machine = pathlib.Path("/etc/machine-id")
    machine_id = machine.read_text().strip() if machine.is_file() else ""
    folder = folder.resolve()
    return f"{platform.node()}/{machine_id}:{folder}#{folder.stat().st_ino}"


BASE_FILE = "lora_base.json"
"""In a run's card: the digest of the weights that published adapters belong to."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def weights_digest(folder: pathlib.Path) -> str:
    """BLAKE3, in hex, of the names and contents of the folder's safetensors files; reads all of them.

    Raises:
      ValueError: a file is missing.
    """
    digest = blake3()
    for path in weight_files(folder):
        if path.parent != folder or not path.is_file():
            raise ValueError(f"{folder} has no weights: {path.name} is missing")
        digest.update(f"{path.name} {blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()}\n".encode())
    return digest.hexdigest()


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folder's safetensors files, one or those that its index names; they need not be there."""
    index = folder / _INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [_SINGLE]
    return [folder / name for name in names]
