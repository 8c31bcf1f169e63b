"""Sources of announced snapshots: `LocalSource` (shared memory) and `RemoteSource` (servers, bucket)."""

import asyncio
import fcntl
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Protocol

from absl import logging

from bridge.files import is_own_folder, make_private_folder, open_own, try_flock
from bridge.rollout_types import Version
from bridge.snapshots.remote.download import DownloadStoppedError
from bridge.snapshots.remote.shared_download import SharedDownload
from bridge.snapshots.snapshot_format import (
    MANIFEST,
    SnapshotError,
    SupersededError,
    TensorTable,
    UnreachableError,
    latest,
)
from bridge.snapshots.verified_copy import VerifiedCopy
from bridge.store.sql.actor_side import ActorStore
from bridge.weight_types import Announcement, WeightManifest

_OWNER = "owner"
_PATIENCE_S = 30.0
"""Seconds that the removal of a dead actor's large copy may take, during which its folder is locked."""


class LocalCopy:
    """Folder of one actor's snapshot copy; a kernel lock reserves it while this process lives."""

    def __init__(self, snapshots: pathlib.Path, actor: str) -> None:
        """Creates the folder, and removes folders of dead actors of this run.

        Raises ValueError if another live process has this name, or another user's folder is in its place.
        """
        sweep(snapshots)
        self._folder = _folder(snapshots, actor)
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                make_private_folder(self._folder)
                self._fd = _lock(self._folder)
            except FileNotFoundError:
                continue  # removed concurrently by `sweep`
            if self._fd is None:
                if time.monotonic() < end_s:
                    time.sleep(_PATIENCE_S / 300)
                    continue
                raise ValueError(
                    f"{self._folder} is locked by a live process with the name {actor}; set another --name"
                )
            if (self._folder / _OWNER).exists():
                return
            os.close(self._fd)

    @property
    def file(self) -> pathlib.Path:
        """File of the copy."""
        return self._folder / "weights"

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def sweep(snapshots: pathlib.Path) -> None:
    """Removes the copies of dead actors."""
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


LOOK_S = 2.0
"""Interval of the download check, in seconds: a stalled download is compared with the current announcement."""
FIRST_ASK_S, LAST_ASK_S = 0.5, 8.0
"""First and longest pause before sources that all lack the announced version are asked again, in seconds."""

MISSING_AFTER = 3
"""Attempts at one announcement after which a version that all sources lack counts as unreachable."""


class WeightSource(Protocol):
    """Source that announces versions and copies them to a local file."""

    async def announced(self) -> WeightManifest | None:
        """Returns the announced version's manifest; None before the first. Only `fetch` verifies it.

        Raises SnapshotError if the manifest is unreadable, or older than a fetched one.
        """
        ...

    async def fetch(self, manifest: WeightManifest) -> pathlib.Path:
        """Returns the local file with the complete, verified version; valid until `release` or the next `fetch`.

        It ends soon after cancellation and keeps the data received.

        Raises SupersededError if another version is announced now, and SnapshotError if this one must not be served.
        """
        ...

    def release(self) -> None:
        """Allows the last fetched file to be overwritten: its tensors are loaded or no longer needed."""
        ...

    def forget(self) -> None:
        """Discards trust in earlier data: the next `fetch` copies everything."""
        ...

    def close(self) -> None:
        """Releases the local files."""
        ...


class LocalSource:
    """Snapshot folder of a learner on this machine, with this actor's own copy."""

    def __init__(
        self,
        snapshots: pathlib.Path,
        local_file: pathlib.Path,
        *,
        run: str,
        tokenizer_hash: str,
        expected: TensorTable,
    ) -> None:
        self._snapshots, self._local_file = snapshots, local_file
        self._mirror = VerifiedCopy(snapshots, local_file, run=run, tokenizer_hash=tokenizer_hash, expected=expected)
        self._announced: tuple[int, int, int] | None = None
        self._manifest: WeightManifest | None = None

    async def announced(self) -> WeightManifest | None:
        """Returns the announced manifest; reads it only if its file changed."""
        try:
            stat = os.stat(self._snapshots / MANIFEST)
        except FileNotFoundError:
            return None
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen != self._announced:
            self._manifest = latest(self._snapshots)
            self._announced = seen
        return self._manifest

    async def fetch(self, manifest: WeightManifest) -> pathlib.Path:
        """Copies the snapshot in another thread."""
        await asyncio.to_thread(self._mirror.fetch, manifest)
        return self._local_file

    def release(self) -> None:
        """Does nothing: no other process overwrites this file."""

    def forget(self) -> None:
        """Does nothing: each `fetch` copies everything."""

    def close(self) -> None:
        """Releases the local file."""
        self._mirror.close()


class RemoteSource:
    """Announcements of the store, and the one download that all actors of this host share.

    If the announced version is unreachable, the older version announced with it (of a slow bucket) is taken if it is
    newer than the last fetched one. The announced version is then tried again first.
    """

    def __init__(
        self, store: ActorStore, shared: SharedDownload, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Borrows `shared`; `close` only leaves it."""
        self._store, self._shared, self._clock = store, shared, clock
        self._seen: Announcement | None = None
        self._offered: Announcement | None = None
        """Last announcement that `announced` returned: the store's, or its older version."""
        self._fetched_older: Announcement | None = None
        """Older version that was fetched and is not yet in the engine."""
        self._fetched: Version | None = None
        """Newest version that was verified to be the learner's."""
        self._is_unreachable = False
        """True if the announced version was unreachable at the last attempt."""
        self._missing: Announcement | None = None
        """Last announcement whose sources all lack the version. `_num_missing` counts its consecutive attempts,
        `_num_lost` those of any announcement, and `_retry_at_s` ends the pause."""
        self._num_missing, self._num_lost, self._retry_at_s = 0, 0, 0.0

    async def announced(self) -> WeightManifest | None:
        """Returns the store's announcement or its older version; queries the store in another thread."""
        announcement = await asyncio.to_thread(self._store.announced)
        if announcement is None:
            return None
        version = announcement.manifest.version
        if self._fetched is not None and version < self._fetched:
            raise SnapshotError(
                f"version {version} is announced after {self._fetched} was fetched: an old manifest was replayed"
            )
        self._seen = announcement
        self._offered = self._fetched_older or await self._older(announcement) or announcement
        return self._offered.manifest

    async def fetch(self, manifest: WeightManifest) -> pathlib.Path:
        """Downloads the version in another thread, or waits for the process that does.

        Its sources may be dead or unreachable: a restarted learner serves elsewhere and announces that, or an older
        version may be reachable. So both are checked whenever the download stalls.
        """
        taken, seen = self._offered, self._seen
        if taken is None or seen is None or taken.manifest != manifest:
            raise SnapshotError(f"version {manifest.version} was not announced")
        if taken == self._missing and self._clock() < self._retry_at_s:
            raise SupersededError(f"version {manifest.version} was recently missing at all of its sources")
        self._is_unreachable = False
        try:
            path = await self._download(taken, seen)
        except UnreachableError:
            self._is_unreachable = taken is seen
            raise
        except SupersededError:
            self._is_unreachable = taken is seen and (self._is_unreachable or self._num_lost > 1)
            raise
        self._fetched, self._missing, self._num_lost = manifest.version, None, 0
        self._fetched_older = None if taken is seen else taken
        return path

    async def _older(self, announcement: Announcement) -> Announcement | None:
        """Returns the version to take while the announced one is unreachable; None to try the announced one."""
        if not self._is_unreachable:
            return None
        try:
            older = await asyncio.to_thread(self._shared.older, announcement, than=self._fetched)
        except SnapshotError as e:  # the announced one may be reachable again
            logging.warning("older snapshot rejected announced=%s reason=%s", announcement.manifest.version, e)
            older, self._is_unreachable = None, False
        if older is not None:
            logging.warning(
                "snapshot unreachable version=%s, using older version=%s source=%s",
                announcement.manifest.version,
                older.manifest.version,
                older.sources[0],
            )
        return older

    async def _download(self, taken: Announcement, seen: Announcement) -> pathlib.Path:
        version = taken.manifest.version
        stop = threading.Event()
        fetching = asyncio.ensure_future(asyncio.to_thread(self._shared.fetch, taken, stop=stop))
        looking = asyncio.create_task(self._until_useless(seen, or_older=taken is seen))
        try:
            await asyncio.wait({fetching, looking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            looking.cancel()
            await asyncio.wait({fetching})  # short: the download must not run on after its files are closed
            error = None if fetching.cancelled() else fetching.exception()
        if isinstance(error, DownloadStoppedError):
            looking.result()  # raises if the store is lost
            self._is_unreachable = True
            raise SupersededError(f"version {version} stopped downloading, and another version is available")
        if isinstance(error, SupersededError):
            self._num_missing = self._num_missing + 1 if taken == self._missing else 1
            self._num_lost += 1
            self._missing = taken
            self._retry_at_s = self._clock() + min(LAST_ASK_S, FIRST_ASK_S * 2 ** min(self._num_lost - 1, 30))
            if self._num_missing >= MISSING_AFTER:  # a version that is superseded has a successor by now
                raise UnreachableError(f"version {version} is at none of its announced sources: {error}")
        return await fetching

    async def _until_useless(self, announcement: Announcement, *, or_older: bool) -> None:
        """Returns when the download stalls and either another version is announced or an older one is reachable."""
        has_requested, arrived = False, -1
        while True:
            had_requested, before = has_requested, arrived
            has_requested, arrived = self._shared.has_requested, self._shared.num_arrived_bytes
            if arrived == before:
                if await asyncio.to_thread(self._store.announced) != announcement:
                    return
                if or_older and had_requested and has_requested and await self._has_older(announcement):
                    return
            await asyncio.sleep(LOOK_S)

    async def _has_older(self, announcement: Announcement) -> bool:
        try:
            return await asyncio.to_thread(self._shared.older, announcement, than=self._fetched) is not None
        except SnapshotError:  # also unreachable, or just deleted
            return False

    def release(self) -> None:
        """Allows other processes of this host to replace the file."""
        self._fetched_older = None
        self._shared.release()

    def forget(self) -> None:
        """Discards earlier data, also for other actors of this host unless they use it now."""
        self._fetched_older = None
        self._shared.forget()

    def close(self) -> None:
        """Leaves the shared download."""
        self._shared.close()
