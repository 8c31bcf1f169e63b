"""Slot locks of versions that are being read over the network.

A slot is locked at the first range of the announced version, so its bytes cannot change during a read. The lock is
released when no range has been read for a moment. A transfer is aborted at the latest `reader_grace_s` after another
version was announced, so the writer never waits longer.

One version at a time gets an additional grace period for slow readers, if the writer has a third slot or memory for
one. The writer continues with the other two slots. A slow reader thereby gets a complete version eventually: this
version, or a later one that is kept after this version's readers finish.
"""

import dataclasses
import fcntl
import os
import pathlib
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from bridge.files import open_own, try_flock
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import MANIFEST, HostFiles, SnapshotError, delta_of, latest
from bridge.weight_types import ShardEntry, WeightManifest

_IDLE_S = 0.25
"""Seconds without a read after which a version counts as unread; a reader pauses between ranges."""


class NoSuchFileError(LookupError):
    """Error for a file of no version that is announced or being read."""


class GoneError(LookupError):
    """Error for a version that is not served any more, because a newer one is announced."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenFile:
    """Open file of a version whose slot is locked."""

    fd: int
    num_bytes: int


class _Held:
    """Shard of a version whose slot is locked."""

    def __init__(self, manifest: WeightManifest, piece: ShardEntry, slot: OpenFile, now_s: float) -> None:
        self.manifest, self.piece = manifest, piece
        self.files: dict[str, OpenFile] = {piece.file.name: slot}
        self.aborts: dict[object, Callable[[], None]] = {}
        """Functions that abort the current transfers."""
        self.read_s = now_s
        self.superseded_s: float | None = None
        self.is_locked = True

    def unlock(self) -> None:
        """Unlocks the slot for the writer; its files are closed after the last transfer."""
        if self.is_locked:
            self.is_locked = False
            fcntl.flock(self.files[self.piece.file.name].fd, fcntl.LOCK_UN)
        self.close_if_unread()

    def close_if_unread(self) -> None:
        if not self.is_locked and not self.aborts:
            for file in self.files.values():
                os.close(file.fd)
            self.files.clear()


class SlotLocks:
    """Locks on the slots of one snapshot folder that are being read. Belongs to one event loop."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        reader_grace_s: float,
        slow_reader_grace_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing; the folder may be created later.

        Any version is served for `reader_grace_s` seconds after another one was announced, and one version for
        `slow_reader_grace_s` seconds more, for which the writer must have a third slot.
        """
        self._folder, self._reader_wait_s, self._clock = pathlib.Path(folder), reader_grace_s, clock
        self._slow_reader_s = slow_reader_grace_s
        self._kept: tuple[Version, str] | None = None
        self._held: dict[tuple[Version, str], _Held] = {}
        """Locked shards by version and slot; shards of several hosts are read and kept separately."""
        self._seen: tuple[int, int, int] | None = None
        self._announced: WeightManifest | None = None

    @contextmanager
    def reading(
        self, run: str, version: Version, name: str, *, abort: Callable[[], None]
    ) -> Generator[OpenFile, None, None]:
        """Yields a file of a version. Calls `abort` if the block lasts too long.

        Raises NoSuchFileError, GoneError, or SnapshotError if the file is shorter than announced.
        """
        held = self._hold(run, version, name)
        file = self._open(held, name)
        transfer = object()
        held.aborts[transfer] = abort
        try:
            yield file
        finally:
            del held.aborts[transfer]
            held.read_s = self._clock()
            held.close_if_unread()

    def sweep(self) -> None:
        """Releases slots that are unread or past their grace period. Call it several times per second."""
        now_s = self._clock()
        announced = self._latest()
        for key, held in list(self._held.items()):
            if announced != held.manifest and held.superseded_s is None:
                held.superseded_s = now_s
            # A slow reader may have lost its connection and will reconnect.
            idle_s = self._reader_wait_s if key == self._kept else _IDLE_S
            is_unread = not held.aborts and now_s - held.read_s >= idle_s
            late_s = -1.0 if held.superseded_s is None else now_s - held.superseded_s - self._reader_wait_s
            if is_unread or (late_s >= 0 and not self._keeps(key, held.piece, late_s)):
                self._let_go(key)

    def close(self) -> None:
        """Aborts every transfer and releases every slot."""
        for key in list(self._held):
            self._let_go(key)

    def _let_go(self, key: tuple[Version, str]) -> None:
        held = self._held.pop(key)
        if key == self._kept:
            self._kept = None
        for abort in list(held.aborts.values()):
            abort()
        held.unlock()

    def _keeps(self, key: tuple[Version, str], piece: ShardEntry, late_s: float) -> bool:
        """Returns True if a version past its grace period is served for slow readers."""
        if late_s >= self._slow_reader_s or self._kept not in (None, key):
            return False
        if not self._has_spare(piece):
            return False
        self._kept = key
        return True

    def _has_spare(self, piece: ShardEntry) -> bool:
        """Returns True if the writer has, or can allocate, a third slot."""
        num_bytes = piece.file.num_bytes
        try:
            if os.stat(self._folder / HostFiles(piece.host).spare).st_size >= num_bytes:
                return True
            stat = os.statvfs(self._folder)
        except FileNotFoundError:
            return False
        return stat.f_bavail * stat.f_frsize >= num_bytes

    def _hold(self, run: str, version: Version, name: str) -> _Held:
        for (held_version, _), held in self._held.items():
            if held_version == version and _has_file(held.piece, name):
                if held.manifest.run != run:
                    raise NoSuchFileError
                return held
        manifest = self._latest()
        if manifest is None or manifest.run != run or version > manifest.version:
            raise NoSuchFileError
        if version < manifest.version:
            raise GoneError
        piece = next((piece for piece in manifest.shards if _has_file(piece, name)), None)
        if piece is None or piece.file.name not in HostFiles(piece.host).slots:
            raise NoSuchFileError
        try:
            fd = open_own(self._folder / piece.file.name, os.O_RDONLY)
        except (FileNotFoundError, ValueError):
            raise NoSuchFileError from None
        # As in `VerifiedCopy`: lock first, and then check that the version is still announced.
        if not try_flock(fd, fcntl.LOCK_SH) or self._latest() != manifest:
            os.close(fd)
            raise GoneError
        slot = _open_file(fd, piece.file.num_bytes)
        held = self._held[version, piece.file.name] = _Held(manifest, piece, slot, self._clock())
        return held

    def _open(self, held: _Held, name: str) -> OpenFile:
        """Returns the data file or the delta, which is also written under the slot's lock."""
        if name not in held.files:
            delta = held.piece.delta
            if delta is None or name != delta_of(held.piece.file.name):
                raise NoSuchFileError
            try:
                fd = open_own(self._folder / name, os.O_RDONLY)
            except (OSError, ValueError):
                raise NoSuchFileError from None
            held.files[name] = _open_file(fd, delta.num_bytes)
        return held.files[name]

    def _latest(self) -> WeightManifest | None:
        """Returns the announced manifest, read again only if its file changed."""
        try:
            stat = os.stat(self._folder / MANIFEST)
        except FileNotFoundError:
            self._seen = self._announced = None
            return None
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen != self._seen:
            self._announced, self._seen = latest(self._folder), seen
        return self._announced


def _has_file(piece: ShardEntry, name: str) -> bool:
    return name == piece.file.name or (piece.delta is not None and name == piece.delta.name)


def _open_file(fd: int, num_bytes: int) -> OpenFile:
    """Wraps `fd`; closes it and raises SnapshotError if the file is too short."""
    if os.fstat(fd).st_size < num_bytes:
        os.close(fd)
        raise SnapshotError(f"file: expected the announced {num_bytes} bytes, but it is shorter")
    return OpenFile(fd, num_bytes)
