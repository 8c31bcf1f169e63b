"""Which versions are being read over the network: their slots are locked until the readers are done, or long enough.

A slot's lock is taken at the first range of a version while it is the announced one, so its bytes can't change since.
It goes when nobody has read for a moment, at the latest `reader_wait_s` after another version was announced, also in
the middle of a transfer: the writer waits no longer than that.
"""

import dataclasses
import fcntl
import os
import pathlib
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from bridge.files import try_flock
from bridge.published import WeightManifest
from bridge.snapshots.layout import MANIFEST, latest
from bridge.types import Version

_PLAIN_NAME = re.compile(r"[a-z]+-[0-9]+")
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
    """A version whose slot we hold locked."""

    def __init__(self, manifest: WeightManifest, lock_fd: int, now_s: float) -> None:
        self.manifest = manifest
        self.files: dict[str, OpenFile] = {manifest.file.name: OpenFile(lock_fd, manifest.file.num_bytes)}
        self.aborts: dict[object, Callable[[], None]] = {}
        """How to end each transfer that is under way."""
        self.read_s = now_s
        self.superseded_s: float | None = None
        self.is_locked = True

    def unlock(self) -> None:
        """Lets the writer in; what is still being read is closed by its reader."""
        if self.is_locked:
            self.is_locked = False
            fcntl.flock(self.files[self.manifest.file.name].fd, fcntl.LOCK_UN)
        self.close_if_unread()

    def close_if_unread(self) -> None:
        if not self.is_locked and not self.aborts:
            for file in self.files.values():
                os.close(file.fd)
            self.files.clear()


class HeldSlots:
    """The slots of one snapshot folder that somebody reads. Of one event loop."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        reader_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is opened yet; the folder may be made later."""
        self._folder, self._reader_wait_s, self._clock = pathlib.Path(folder), reader_wait_s, clock
        self._held: dict[Version, _Held] = {}
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
        """
        held = self._hold(run, version)
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
        for version, held in list(self._held.items()):
            if announced != held.manifest and held.superseded_s is None:
                held.superseded_s = now_s
            is_late = held.superseded_s is not None and now_s - held.superseded_s >= self._reader_wait_s
            if is_late or (not held.aborts and now_s - held.read_s >= _IDLE_S):
                del self._held[version]
                for abort in list(held.aborts.values()):
                    abort()
                held.unlock()

    def close(self) -> None:
        """Ends every transfer and lets go of every slot."""
        for held in self._held.values():
            for abort in list(held.aborts.values()):
                abort()
            held.unlock()
        self._held.clear()

    def _hold(self, run: str, version: Version) -> _Held:
        if (held := self._held.get(version)) is not None:
            if held.manifest.run != run:
                raise NoSuchFileError
            return held
        manifest = self._latest()
        if manifest is None or manifest.run != run or version > manifest.version:
            raise NoSuchFileError
        if version < manifest.version:
            raise GoneError
        try:
            fd = os.open(self._folder / manifest.file.name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NoSuchFileError from None
        # As in `SnapshotMirror`: locked first, then looked whether it is still the announced one.
        if not try_flock(fd, fcntl.LOCK_SH) or self._latest() != manifest:
            os.close(fd)
            raise GoneError
        held = self._held[version] = _Held(manifest, fd, self._clock())
        return held

    def _open(self, held: _Held, name: str) -> OpenFile:
        """The data file is open already; the delta lies beside it, and is written under the same lock."""
        if name not in held.files:
            delta = held.manifest.delta
            if delta is None or name != delta.name or not _PLAIN_NAME.fullmatch(name):
                raise NoSuchFileError
            try:
                fd = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                raise NoSuchFileError from None
            held.files[name] = OpenFile(fd, delta.num_bytes)
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
