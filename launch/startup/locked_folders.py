"""Folders in the cache that actors make, and who removes them: the last one that uses them, or the next start.

Who uses a folder holds a lock, which dies with its process. So what a killed actor left is found, and nothing that a
live one uses is touched.
"""

import fcntl
import os
import pathlib
import shutil
import time

from bridge.files import try_flock

LEFT_S = 3600.0
"""A dead actor's work folder is removed by others once nothing was written there for so long: until then the actor may
be started again, with the limits that it was given, or looked into."""
_LOCK = "actor.lock"
_PATIENCE_S = 1.0
"""Somebody who sweeps has a lock for a moment."""


class ActorWorkFolder:
    """One actor's events and limits; removed at its end if it is in the cache and its actor is done with it."""

    def __init__(self, path: pathlib.Path, name: str, *, is_ours: bool) -> None:
        """Makes and locks it.

        Args:
          path: the folder.
          name: the actor's.
          is_ours: it is in the cache, among those of other actors; what dead ones left there is removed. Otherwise it
            is the user's, and stays.

        Raises:
          ValueError: a live actor has it.
        """
        self.path, self._is_ours = path, is_ours
        if is_ours:
            _sweep_work(path.parent, keep=path)
        end_s = time.monotonic() + _PATIENCE_S
        while (fd := _locked(path, path / _LOCK, fcntl.LOCK_EX)) is None:
            if time.monotonic() > end_s:
                raise ValueError(f"a live actor {name} has {path}; give another --name, or --work_dir")
            time.sleep(_PATIENCE_S / 20)
        self._fd: int | None = fd
        self.is_done = False
        """Whether the actor has ended well and will not be started again for what is here."""

    def close(self) -> None:
        """Lets the next one in; removes the folder if it is done with."""
        if self._fd is None:
            return
        if self.is_done and self._is_ours:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)
        self._fd = None


class ModelFolderLock:
    """This process's use of a model's folder that actors of a host share: FOLDER, with FOLDER.users beside it."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Begins; what nobody uses any more beside it is removed. The folder itself is made by whoever fills it."""
        _sweep_models(folder.parent, keep=folder)
        self._folder, self._users = folder, _users_of(folder)
        while (fd := _locked(folder.parent, self._users, fcntl.LOCK_SH)) is None:
            time.sleep(_PATIENCE_S / 20)  # somebody removes it
        self._fd: int | None = fd

    def close(self) -> None:
        """Ends it; the last one removes the folder."""
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
    """Called with the exclusive lock; the lock's file last, so that a removal that is killed is found."""
    shutil.rmtree(folder, ignore_errors=True)
    _users_of(folder).unlink(missing_ok=True)


def _users_of(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f"{folder.name}.users")


def _locked(folder: pathlib.Path, file: pathlib.Path, operation: int, *, is_made: bool = True) -> int | None:
    """The locked file, in its folder; None if somebody is in the way, or it was removed before it was locked."""
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
    """When something in a folder was last written; Unix time."""
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except FileNotFoundError:
            continue
    return newest
