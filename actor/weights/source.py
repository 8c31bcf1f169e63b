"""`LocalSource` (shared memory) and `RemoteSource` (servers, bucket) of announced snapshots."""

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


LOOK_S = 2.0
"""A download of which nothing has arrived for so long is held against what is announced now."""
FIRST_ASK_S, LAST_ASK_S = 0.5, 8.0
"""How long sources that all lack the announced version are left alone, the first time and at most."""


class WeightSource(Protocol):
    """Announces versions, and brings them to a local file."""

    async def announced(self) -> WeightManifest | None:
        """The announced version's manifest; None before the first. It is not believed before `fetch` has checked it.

        Raises:
          SnapshotError: it can't be read, or is older than one that was fetched.
        """
        ...

    async def fetch(self, manifest: WeightManifest) -> pathlib.Path:
        """The local file that holds a version, whole and verified; until `release`, or the next `fetch`.

        Ends soon after it is cancelled; what arrived by then stays.

        Raises:
          SupersededError: take the version that is announced now.
          SnapshotError: do not serve this version.
        """
        ...

    def release(self) -> None:
        """Lets the file of the last `fetch` be overwritten: its tensors are in the engine, or not wanted any more."""
        ...

    def forget(self) -> None:
        """From here on trusts nothing that was fetched before: the next `fetch` brings all of it."""
        ...

    def close(self) -> None:
        """Lets go of the local files."""
        ...


class LocalSource:
    """The snapshot folder of a learner on this machine, and a mirror of this actor's own."""

    def __init__(
        self,
        snapshots: pathlib.Path,
        local_file: pathlib.Path,
        *,
        run: str,
        tokenizer_hash: str,
        expected: TensorTable,
    ) -> None:
        """`snapshots` is where the learner publishes, `local_file` this actor's own warm copy."""
        self._snapshots, self._local_file = snapshots, local_file
        self._mirror = VerifiedCopy(snapshots, local_file, run=run, tokenizer_hash=tokenizer_hash, expected=expected)
        self._announced: tuple[int, int, int] | None = None
        self._manifest: WeightManifest | None = None

    async def announced(self) -> WeightManifest | None:
        """The announced manifest, read again only when its file is another one."""
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
        """Copies it, in another thread."""
        await asyncio.to_thread(self._mirror.fetch, manifest)
        return self._local_file

    def release(self) -> None:
        """Nobody else overwrites this file."""

    def forget(self) -> None:
        """Each `fetch` copies everything."""

    def close(self) -> None:
        """Lets go of the local file."""
        self._mirror.close()


class RemoteSource:
    """What the store announces, and the one download that all actors of this host share.

    Where the announced version is out of reach, the older one that is announced beside it (a slow bucket's) is taken if
    it is newer than what was fetched before. After each such one the announced version is tried again first.
    """

    def __init__(
        self, store: ActorStore, shared: SharedDownload, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes over `shared`, which `close` leaves."""
        self._store, self._shared, self._clock = store, shared, clock
        self._seen: Announcement | None = None
        """What the store said last."""
        self._offered: Announcement | None = None
        """What `announced` gave out: that, or the older version beside it."""
        self._fetched_older: Announcement | None = None
        """An older version that was fetched and is not in the engine yet."""
        self._fetched: Version | None = None
        """The newest version that was proved to be the learner's."""
        self._is_unreachable = False
        """Whether the announced version was out of reach when it was last tried."""
        self._missing: Announcement | None = None
        """The last announcement whose sources all said that they lack the version; how often in turn, and until when
        they are not asked again."""
        self._num_lost, self._retry_at_s = 0, 0.0

    async def announced(self) -> WeightManifest | None:
        """What the store says, or the older version beside it; asked in another thread."""
        announcement = await asyncio.to_thread(self._store.announced)
        if announcement is None:
            return None
        version = announcement.manifest.version
        if self._fetched is not None and version < self._fetched:
            raise SnapshotError(
                f"announced is version {version}, but {self._fetched} was fetched before: an old manifest was replayed"
            )
        self._seen = announcement
        self._offered = self._fetched_older or await self._older(announcement) or announcement
        return self._offered.manifest

    async def fetch(self, manifest: WeightManifest) -> pathlib.Path:
        """Downloads it in another thread, or waits for who does.

        Its sources may be dead ones, or behind a wall: a learner that started anew serves elsewhere, and announces; and
        an older version may lie in reach. So whenever nothing arrives any more it is looked for both.
        """
        taken, seen = self._offered, self._seen
        if taken is None or seen is None or taken.manifest != manifest:
            raise SnapshotError(f"version {manifest.version} was not announced")
        if taken == self._missing and self._clock() < self._retry_at_s:
            raise SupersededError(f"version {manifest.version} was at none of its sources a moment ago")
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
        """The version to take while the announced one is out of reach; None: try that one."""
        if not self._is_unreachable:
            return None
        try:
            older = await asyncio.to_thread(self._shared.older, announcement, than=self._fetched)
        except SnapshotError as e:  # the announced one may be in reach again
            logging.warning("older snapshot not taken announced=%s reason=%s", announcement.manifest.version, e)
            older, self._is_unreachable = None, False
        if older is not None:
            logging.warning(
                "snapshot out of reach version=%s; %s is taken from where it lies: %s",
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
            await asyncio.wait({fetching})  # a moment: nothing of it may run on once its files are closed
            error = None if fetching.cancelled() else fetching.exception()
        if isinstance(error, DownloadStoppedError):
            looking.result()  # or the store is lost
            self._is_unreachable = True
            raise SupersededError(f"version {version} stopped arriving, and something else is there to be had")
        if isinstance(error, SupersededError):
            self._num_lost += 1
            self._missing = taken
            self._retry_at_s = self._clock() + min(LAST_ASK_S, FIRST_ASK_S * 2 ** min(self._num_lost - 1, 30))
        return await fetching

    async def _until_useless(self, announcement: Announcement, *, or_older: bool) -> None:
        """Returns when nothing more arrives and something else is announced, or an older version is in reach."""
        arrived = -1
        while True:
            before, arrived = arrived, self._shared.num_arrived_bytes
            if arrived == before:
                if await asyncio.to_thread(self._store.announced) != announcement:
                    return
                if or_older and await self._has_older(announcement):
                    return
            await asyncio.sleep(LOOK_S)

    async def _has_older(self, announcement: Announcement) -> bool:
        try:
            return await asyncio.to_thread(self._shared.older, announcement, than=self._fetched) is not None
        except SnapshotError:  # out of reach too, or just deleted
            return False

    def release(self) -> None:
        """Lets other processes of this host put a newer version there."""
        self._fetched_older = None
        self._shared.release()

    def forget(self) -> None:
        """Also for the other actors of this host, where they don't use it just now."""
        self._fetched_older = None
        self._shared.forget()

    def close(self) -> None:
        """Leaves the shared download."""
        self._shared.close()
