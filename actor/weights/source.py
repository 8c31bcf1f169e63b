"""Where an actor's weights come from: the learner's own memory, or another machine's."""

import asyncio
import os
import pathlib
import threading
from typing import Protocol

from bridge.published import Announcement, WeightManifest
from bridge.snapshots.download import StoppedError
from bridge.snapshots.layout import MANIFEST, SnapshotError, SupersededError, TensorTable, latest
from bridge.snapshots.mirror import SnapshotMirror
from bridge.snapshots.shared import SharedCopy
from bridge.store.protocol import ActorStore
from bridge.types import Version

LOOK_S = 2.0
"""A download of which nothing has arrived for so long is held against what is announced now."""


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
        self._mirror = SnapshotMirror(snapshots, local_file, run=run, tokenizer_hash=tokenizer_hash, expected=expected)
        self._seen: tuple[int, int, int] | None = None
        self._manifest: WeightManifest | None = None

    async def announced(self) -> WeightManifest | None:
        """The announced manifest, read again only when its file is another one."""
        try:
            stat = os.stat(self._snapshots / MANIFEST)
        except FileNotFoundError:
            return None
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen != self._seen:
            self._manifest = latest(self._snapshots)
            self._seen = seen
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
    """What the store announces, and the one download that all actors of this host share."""

    def __init__(self, store: ActorStore, shared: SharedCopy) -> None:
        """Takes over `shared`, which `close` leaves."""
        self._store, self._shared = store, shared
        self._announcement: Announcement | None = None
        self._fetched: Version | None = None
        """The newest version that was proved to be the learner's."""

    async def announced(self) -> WeightManifest | None:
        """What the store says; asked in another thread."""
        announcement = await asyncio.to_thread(self._store.announced)
        if announcement is None:
            return None
        version = announcement.manifest.version
        if self._fetched is not None and version < self._fetched:
            raise SnapshotError(
                f"announced is version {version}, but {self._fetched} was fetched before: an old manifest was replayed"
            )
        self._announcement = announcement
        return announcement.manifest

    async def fetch(self, manifest: WeightManifest) -> pathlib.Path:
        """Downloads it in another thread, or waits for who does.

        Its sources may be dead ones: a learner that started anew serves elsewhere, and announces. So whenever nothing
        arrives any more it is looked for that.
        """
        announcement = self._announcement
        if announcement is None or announcement.manifest != manifest:
            raise SnapshotError(f"version {manifest.version} was not announced")
        stop = threading.Event()
        fetching = asyncio.ensure_future(asyncio.to_thread(self._shared.fetch, announcement, stop=stop))
        looking = asyncio.create_task(self._until_useless(announcement))
        try:
            await asyncio.wait({fetching, looking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            looking.cancel()
            await asyncio.wait({fetching})  # a moment: nothing of it may run on once its files are closed
            error = None if fetching.cancelled() else fetching.exception()
        if isinstance(error, StoppedError):
            looking.result()  # or the store is lost
            raise SupersededError(f"version {manifest.version} stopped arriving, and another announcement is out")
        path = await fetching
        self._fetched = manifest.version
        return path

    async def _until_useless(self, announcement: Announcement) -> None:
        """Returns when nothing more arrives and something else is announced."""
        arrived = -1
        while True:
            before, arrived = arrived, self._shared.num_arrived_bytes
            if arrived == before and await asyncio.to_thread(self._store.announced) != announcement:
                return
            await asyncio.sleep(LOOK_S)

    def release(self) -> None:
        """Lets other processes of this host put a newer version there."""
        self._shared.release()

    def forget(self) -> None:
        """Also for the other actors of this host, where they don't use it just now."""
        self._shared.forget()

    def close(self) -> None:
        """Leaves the shared download."""
        self._shared.close()
