"""Cache folders of actors, and their removal by the last user or at a later start.

Each user of a folder holds a lock, which the kernel releases when its process dies. A later start therefore finds the
folders of killed actors and leaves folders in use alone.
"""

import fcntl
import os
import pathlib
import shutil
import time

from bridge.files import try_flock

LEFT_S = 3600.0
"""Seconds without a write after which a dead actor's work folder is removed. Until then, the actor may restart with its
limits, or a person may inspect the folder."""
_LOCK = "actor.lock"
_PATIENCE_S = 1.0
"""Seconds to retry a lock, because a process that cleans up holds it briefly."""


class ActorWorkFolder:
    """Folder of one actor's events and limits, removed on close if it is in the cache and the actor is done."""

    def __init__(self, path: pathlib.Path, name: str, *, is_ours: bool) -> None:
        """Creates and locks the folder. Raises ValueError if a live actor uses it.

        With `is_ours` the folder is in the cache, where folders of dead actors are removed. A user's folder is kept.
        """
        self.path, self._is_ours = path, is_ours
        if is_ours:
            _sweep_work(path.parent, keep=path)
        end_s = time.monotonic() + _PATIENCE_S
        while (fd := _locked(path, path / _LOCK, fcntl.LOCK_EX)) is None:
            if time.monotonic() > end_s:
                raise ValueError(f"{path} is used by a live actor {name}; set another --name or --work_dir")
            time.sleep(_PATIENCE_S / 20)
        self._fd: int | None = fd
        self.is_done = False
        """True if the actor has finished and will not restart with the folder's content."""

    def close(self) -> None:
        """Releases the lock; removes a cache folder if the actor is done."""
        if self._fd is None:
            return
        if self.is_done and self._is_ours:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)
        self._fd = None


class ModelFolderLock:
    """Shared lock on a model folder that actors of one host share; the lock file is FOLDER.users."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Locks the folder, which its first user fills, and removes unused folders next to it."""
        _sweep_models(folder.parent, keep=folder)
        self._folder, self._users = folder, _users_of(folder)
        while (fd := _locked(folder.parent, self._users, fcntl.LOCK_SH)) is None:
            time.sleep(_PATIENCE_S / 20)  # another process is removing the folder
        self._fd: int | None = fd

    def close(self) -> None:
        """Releases the lock; the last user removes the folder."""
        if self._fd is None:
            return
        if try_flock(self._fd, fcntl.LOCK_EX):
            _remove_model(self._folder)
        os.close(self._fd)
        self._fd = None


def _sweep_work(root: pathlib.Path, *, keep: pathlib.Path) -> None:
    for folder in root.glob("*"):
        if folder == keep or not folder.is_dir() or time.time() - _written_s(folder) < LEFT_S:
            continue
        fd = _locked(folder, folder / _LOCK, fcntl.LOCK_EX, is_made=False)
        if fd is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def _sweep_models(root: pathlib.Path, *, keep: pathlib.Path) -> None:
    for users in root.glob("*.users"):
        folder = users.with_suffix("")
        if folder != keep and (fd := _locked(root, users, fcntl.LOCK_EX, is_made=False)) is not None:
            _remove_model(folder)
            os.close(fd)


def _remove_model(folder: pathlib.Path) -> None:
    """Removes a model folder under the exclusive lock; the lock file goes last, so a killed removal is repeated."""
    shutil.rmtree(folder, ignore_errors=True)
    _users_of(folder).unlink(missing_ok=True)


def _users_of(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f"{folder.name}.users")


def _locked(folder: pathlib.Path, file: pathlib.Path, operation: int, *, is_made: bool = True) -> int | None:
    """Returns the descriptor of the locked file; None if another process holds it or the file was removed."""
    try:
        if is_made:
            folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if is_made else 0), 0o644)
    except FileNotFoundError:
        return None
    if try_flock(fd, operation) and os.fstat(fd).st_nlink:
        return fd
    os.close(fd)
    return None


def _written_s(folder: pathlib.Path) -> float:
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return newest
