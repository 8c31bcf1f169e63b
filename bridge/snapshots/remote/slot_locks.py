"""Which versions are being read over the network: their slots are locked until the readers are done, or long enough.

A slot's lock is taken at the first range of a version while it is the announced one, so its bytes can't change since.
It goes when nobody has read for a moment, at the latest `reader_grace_s` after another version was announced, also in
the middle of a transfer: the writer waits no longer than that.

One version at a time is kept for longer, for readers slower than versions come, where the writer has a third slot, or
the room for one: it goes on with the other two. So whoever is slow gets a whole version in the end: this one, or, when
its readers are done, the next that is read for so long.
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
"""A reader that fetches range after range is not done between two of them."""


class NoSuchFileError(LookupError):
    """No version that is announced or being read has such a file."""


class GoneError(LookupError):
    """A version that is no longer served: a newer one is announced."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of a version whose slot is locked."""

    fd: int
    num_bytes: int


class _Held:
    """A piece of a version, whose slot we hold locked."""

    def __init__(self, manifest: WeightManifest, piece: ShardEntry, slot: OpenFile, now_s: float) -> None:
        self.manifest, self.piece = manifest, piece
        self.files: dict[str, OpenFile] = {piece.file.name: slot}
        self.aborts: dict[object, Callable[[], None]] = {}
        """How to end each transfer that is under way."""
        self.read_s = now_s
        self.superseded_s: float | None = None
        self.is_locked = True

    def unlock(self) -> None:
        """Lets the writer in; what is still being read is closed by its reader."""
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
    """The slots of one snapshot folder that somebody reads. Of one event loop."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        reader_grace_s: float,
        slow_reader_grace_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is opened yet; the folder may be made later.

        Args:
          folder: the writer's; with `slow_reader_grace_s` of a writer with a third slot.
          reader_grace_s: how long any version is served on after another one was announced.
          slow_reader_grace_s: how long one version is served on after that; 0: none is.
          clock: monotonic, in seconds.
        """
        self._folder, self._reader_wait_s, self._clock = pathlib.Path(folder), reader_grace_s, clock
        self._slow_reader_s = slow_reader_grace_s
        self._kept: tuple[Version, str] | None = None
        self._held: dict[tuple[Version, str], _Held] = {}
        """Version and slot; of several hosts' pieces each is read, and kept, by itself."""
        self._seen: tuple[int, int, int] | None = None
        self._announced: WeightManifest | None = None

    @contextmanager
    def reading(
        self, run: str, version: Version, name: str, *, abort: Callable[[], None]
    ) -> Generator[OpenFile, None, None]:
        """A file of a version, for as long as the block lasts; `abort` is called when it lasts too long.

        Raises:
          NoSuchFileError: there is none, of this name.
          GoneError: a newer version was announced, and nobody was reading this one.
          SnapshotError: the file is shorter than it was announced.
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
        """Lets go of what nobody reads, and of what was read for too long; to be called every fraction of a second."""
        now_s = self._clock()
        announced = self._latest()
        for key, held in list(self._held.items()):
            if announced != held.manifest and held.superseded_s is None:
                held.superseded_s = now_s
            # Who is slow may have lost its connection, and begins again in a moment.
            idle_s = self._reader_wait_s if key == self._kept else _IDLE_S
            is_unread = not held.aborts and now_s - held.read_s >= idle_s
            late_s = -1.0 if held.superseded_s is None else now_s - held.superseded_s - self._reader_wait_s
            if is_unread or (late_s >= 0 and not self._keeps(key, held.piece, late_s)):
                self._let_go(key)

    def close(self) -> None:
        """Ends every transfer and lets go of every slot."""
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
        """Whether a version is served on, though others are announced and it is late."""
        if late_s >= self._slow_reader_s or self._kept not in (None, key):
            return False
        if not self._has_spare(piece):
            return False
        self._kept = key
        return True

    def _has_spare(self, piece: ShardEntry) -> bool:
        """Whether the writer can go on without the slot that is kept: looked at again and again."""
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
        # As in `VerifiedCopy`: locked first, then looked whether it is still the announced one.
        if not try_flock(fd, fcntl.LOCK_SH) or self._latest() != manifest:
            os.close(fd)
            raise GoneError
        slot = _open_file(fd, piece.file.num_bytes)
        held = self._held[version, piece.file.name] = _Held(manifest, piece, slot, self._clock())
        return held

    def _open(self, held: _Held, name: str) -> OpenFile:
        """The data file is open already; the delta lies beside it, and is written under the same lock."""
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
        """The announced manifest, read again only when its file is another one."""
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
    """Takes over `fd`, and closes it where the file is too short."""
    if os.fstat(fd).st_size < num_bytes:
        os.close(fd)
        raise SnapshotError(f"a file that is announced with {num_bytes} bytes is shorter")
    return OpenFile(fd, num_bytes)
