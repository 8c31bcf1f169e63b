"""An actor's own folder of warm memory, beside the snapshots; it goes when its actor is gone."""

import fcntl
import os
import pathlib
import shutil

from bridge.files import is_own_folder, make_private_folder, open_own, try_flock

_OWNER = "owner"


class LocalCopy:
    """Where one actor mirrors snapshots; the kernel keeps it ours for as long as this process lives."""

    def __init__(self, snapshots: pathlib.Path, actor: str) -> None:
        """Makes the folder, and removes those that killed actors of this run left behind.

        Raises:
          ValueError: another live process is this actor, or another user's folder is in its place.
        """
        sweep(snapshots)
        self._folder = _folder(snapshots, actor)
        while True:
            try:
                make_private_folder(self._folder)
                self._fd = _lock(self._folder)
            except FileNotFoundError:
                continue  # swept away in between
            if self._fd is None:
                raise ValueError(f"another live process is {actor}: it holds {self._folder}; give another --name")
            if (self._folder / _OWNER).exists():
                return
            os.close(self._fd)

    @property
    def file(self) -> pathlib.Path:
        """The mirror's file."""
        return self._folder / "weights"

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def sweep(snapshots: pathlib.Path) -> None:
    """Removes the copies of actors that no longer live."""
    for folder in snapshots.parent.glob(f"{_folder(snapshots, '').name}*"):
        if not is_own_folder(folder):
            continue
        try:
            fd = _lock(folder)
        except (FileNotFoundError, ValueError):
            continue
        if fd is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


def _folder(snapshots: pathlib.Path, actor: str) -> pathlib.Path:
    return snapshots.with_name(f"{snapshots.name}.copy-{actor}")


def _lock(folder: pathlib.Path) -> int | None:
    fd = open_own(folder / _OWNER, os.O_RDWR | os.O_CREAT)
    if try_flock(fd, fcntl.LOCK_EX):
        return fd
    os.close(fd)
    return None
