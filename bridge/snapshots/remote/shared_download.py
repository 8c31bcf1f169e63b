"""Shared download of one host: two files in shared memory, used in turn, from which all its actors map their tensors.

copy-0, copy-1      copies, each with its `.manifest`, or its `.part` while it is being filled
download            locked by the downloading process; if it dies, the next one resumes the download
users               locked by every process that uses the folder; the last one removes it
"""

import fcntl
import os
import pathlib
import shutil
import threading
import time
import urllib.parse

from bridge.files import is_own_folder, make_private_folder, open_own, try_flock
from bridge.rollout_types import Version
from bridge.snapshots.remote.download import DownloadStoppedError
from bridge.snapshots.remote.fetcher import SnapshotFetcher
from bridge.snapshots.remote.shard_fetch import held_in
from bridge.snapshots.snapshot_format import SnapshotBusyError, SupersededError, manifest_path, part_path
from bridge.weight_types import Announcement, WeightManifest

_FILES = ("copy-0", "copy-1")
_DOWNLOAD = "download"
_USERS = "users"
_PREFIX = "sluice-shared"
_POLL_S = 0.05


class SharedDownload:
    """Newest snapshots of a run, shared by a host's processes. One thread at a time, except for `older`."""

    def __init__(self, root: pathlib.Path, *, run: str, fetcher: SnapshotFetcher, wait_s: float = 600.0) -> None:
        """Joins this user's processes on this host that follow the run, and removes folders of dead ones.

        `root` is in shared memory; `wait_s` bounds the wait for another process's download. Raises ValueError if
        another user owns the folder.
        """
        _sweep(root)
        self._folder = root / f"{_PREFIX}-{os.geteuid()}-{urllib.parse.quote(run, safe='')}"
        self._fetcher, self._wait_s = fetcher, wait_s
        self._users_fd: int | None = _join(self._folder)
        self._download_fd = open_own(self._folder / _DOWNLOAD, os.O_RDWR | os.O_CREAT)
        self._pin_fd: int | None = None
        self._is_downloading = False
        """True while this process fetches, and False while it waits for another one that does."""

    def fetch(self, announcement: Announcement, *, stop: threading.Event) -> pathlib.Path:
        """Returns the file with a complete, verified version, fetched by this process or another.

        The file is not overwritten until the next call or `release`.

        Raises:
          SupersededError: this host has a newer version, or no source has this version any more.
          SnapshotBusyError: another process was downloading for `wait_s`.
          DownloadStoppedError: `stop` was set.
          SnapshotError: as `SnapshotFetcher.fetch`.
        """
        self.release()
        manifest = announcement.manifest
        self._fetcher.check(announcement)
        deadline_s = time.monotonic() + self._wait_s
        while (path := self._pinned(manifest)) is None:
            if try_flock(self._download_fd, fcntl.LOCK_EX):
                try:
                    if (path := self._pinned(manifest)) is None:
                        self._download(announcement, stop)
                finally:
                    fcntl.flock(self._download_fd, fcntl.LOCK_UN)
            elif time.monotonic() >= deadline_s:
                raise SnapshotBusyError(
                    f"another process of this host is still downloading into {self._folder} after {self._wait_s:.0f} s"
                )
            elif stop.wait(_POLL_S):
                raise DownloadStoppedError("stopped on request while another process downloads")
        return path

    def older(self, announcement: Announcement, *, than: Version | None) -> Announcement | None:
        """Returns an older version, as `SnapshotFetcher.older`."""
        return self._fetcher.older(announcement, than=than)

    @property
    def num_arrived_bytes(self) -> int:
        """Bytes received by this process's own download; downloads of other processes do not count."""
        return self._fetcher.num_arrived_bytes

    @property
    def has_requested(self) -> bool:
        """True if this process downloads and has sent a request; before, it allocates memory and hashes."""
        return self._is_downloading and self._fetcher.has_requested

    def release(self) -> None:
        """Allows the file of the last `fetch` to be overwritten."""
        if self._pin_fd is not None:
            os.close(self._pin_fd)
            self._pin_fd = None

    def forget(self) -> None:
        """Invalidates all files of this folder that no process is using, so that they are downloaded again."""
        self.release()
        for file in (self._folder / name for name in _FILES):
            try:
                fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if try_flock(fd, fcntl.LOCK_EX):
                manifest_path(file).unlink(missing_ok=True)
                part_path(file).unlink(missing_ok=True)
            os.close(fd)

    def close(self) -> None:
        """Leaves the folder; the last process removes it."""
        self.release()
        self._fetcher.close()
        if self._users_fd is not None:
            os.close(self._download_fd)
            if try_flock(self._users_fd, fcntl.LOCK_EX):
                shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._users_fd)
            self._users_fd = None

    def _download(self, announcement: Announcement, stop: threading.Event) -> None:
        into = self._oldest()
        before = next(self._folder / name for name in _FILES if name != into.name)
        self._is_downloading = True
        try:
            self._fetcher.fetch(announcement, into, stop=stop, base=before)
        except SnapshotBusyError:
            # Processes that map the file keep it; only its name is removed.
            for file in (manifest_path(into), part_path(into), into):
                file.unlink(missing_ok=True)
            self._fetcher.fetch(announcement, into, stop=stop, base=before)
        finally:
            self._is_downloading = False

    def _find(self, manifest: WeightManifest) -> pathlib.Path | None:
        """Returns the file that holds a version, if any. Raises SupersededError if one holds a newer version."""
        for name in _FILES:
            held = held_in(self._folder / name)
            if held == manifest:
                return self._folder / name
            if held is not None and held.version > manifest.version:
                raise SupersededError(f"version {manifest.version} was superseded: {held.version} is on this host")
        return None

    def _pinned(self, manifest: WeightManifest) -> pathlib.Path | None:
        """Returns the file that holds a version, locked against overwriting; None if there is none."""
        path = self._find(manifest)
        if path is None:
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if try_flock(fd, fcntl.LOCK_SH) and held_in(path) == manifest:
            self._pin_fd = fd
            return path
        os.close(fd)  # it is being overwritten
        return None

    def _oldest(self) -> pathlib.Path:
        """Returns the file to fill: a broken download, an empty file, or the older version."""

        def rank(path: pathlib.Path) -> tuple[bool, tuple[int, int]]:
            held = held_in(path)
            if held is None:
                return False, (0, 0) if part_path(path).exists() else (0, 1)
            return True, (held.version.incarnation, held.version.step)

        return min((self._folder / name for name in _FILES), key=rank)


def _join(folder: pathlib.Path) -> int:
    while True:
        try:
            make_private_folder(folder)
            fd = open_own(folder / _USERS, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue  # removed by another process
        # A process that removes the folder holds the lock exclusively.
        fcntl.flock(fd, fcntl.LOCK_SH)
        if (folder / _USERS).exists() and os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _sweep(root: pathlib.Path) -> None:
    for folder in root.glob(f"{_PREFIX}-{os.geteuid()}-*"):
        if not is_own_folder(folder):
            continue
        try:
            fd = open_own(folder / _USERS, os.O_RDWR)
        except (OSError, ValueError):
            continue
        if try_flock(fd, fcntl.LOCK_EX):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)
