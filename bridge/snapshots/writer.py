"""Weight snapshots in shared memory: written in place, announced by one rename.

A version is written into the slot that nobody has been told of, hashed, and announced. Until then,
and whatever happens to its writer, readers find the version before it, whole.
"""

import dataclasses
import fcntl
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

import numpy as np
from absl import logging

from bridge import codec
from bridge.files import replace_file, try_flock
from bridge.published import DeltaEntry, FileEntry, WeightManifest
from bridge.secrets import Token
from bridge.snapshots.cast import cast_all_into
from bridge.snapshots.chunks import CHUNK_BYTES, hashed, unhashed
from bridge.snapshots.delta import make_delta
from bridge.snapshots.layout import (
    DELTAS,
    MANIFEST,
    SLOTS,
    WRITER,
    SnapshotBusyError,
    SnapshotError,
    SupersededError,
    latest,
    lay_out,
    reserve,
    view,
)
from bridge.snapshots.mirror import SnapshotMirror, fetch, map_tensors, mirrored
from bridge.snapshots.segment import Segment
from bridge.snapshots.signing import sign
from bridge.types import Version

__all__ = [
    "SnapshotBusyError",
    "SnapshotDraft",
    "SnapshotError",
    "SnapshotMirror",
    "SnapshotWriter",
    "SupersededError",
    "fetch",
    "latest",
    "map_tensors",
    "mirrored",
]


class SnapshotWriter:
    """Publishes into one folder; the only process that may. Not for several threads at once."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str,
        tokenizer_hash: str,
        lock_timeout_s: float = 60.0,
        token: Token | None = None,
        full_every: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Makes the folder, or takes it over from a dead writer of the same run; what it announced stays.

        With a token manifests are signed, as actors on other machines want them. Of this writer's versions each
        `full_every`-th, from the first on, has no delta against the one before.

        Raises:
          SnapshotError: another writer lives, or the folder holds another run's snapshots.
        """
        self._folder = pathlib.Path(folder)
        self._run, self._tokenizer_hash = run, tokenizer_hash
        self._lock_timeout_s, self._chunk_bytes, self._clock = lock_timeout_s, chunk_bytes, clock
        self._token, self._full_every = token, full_every
        self._base: WeightManifest | None = None
        self._num_announced = 0
        self._draft: SnapshotDraft | None = None
        self._segments: tuple[Segment, ...] = ()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self._folder / WRITER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not try_flock(self._lock_fd, fcntl.LOCK_EX):
                raise SnapshotError(f"another live process publishes into {self._folder}")
            announced = latest(self._folder)
            if announced is not None and announced.run != run:
                raise SnapshotError(
                    f"{self._folder} holds snapshots of run {announced.run!r}, this is {run!r}: "
                    "remove the folder or choose another"
                )
            self._segments = tuple(Segment(self._folder / name) for name in SLOTS)
        except BaseException:
            self.close()
            raise

    def begin(self, version: Version, entries: Iterable[tuple[str, str, Sequence[int]]]) -> "SnapshotDraft":
        """Starts a version of the given (name, dtype, shape) tensors; waits for slow readers.

        Raises:
          ValueError: not newer than the announced version, a dtype not served, a draft still open.
          SnapshotError: too little room; or (SnapshotBusyError) a reader did not finish in time.
        """
        if self._draft is not None:
            raise ValueError(f"version {self._draft.version} is neither committed nor aborted")
        announced = latest(self._folder)
        if announced is not None and version <= announced.version:
            raise ValueError(f"version {version} is not newer than the announced {announced.version}")
        tensors, num_bytes = lay_out(entries)
        # The announced slot is only ever read; its sibling is free as soon as its last reader is done.
        slot = 1 if announced is not None and announced.file.name == SLOTS[0] else 0
        manifest = WeightManifest(
            run=self._run,
            version=version,
            tensors=tensors,
            file=unhashed(SLOTS[slot], num_bytes, smallest=self._chunk_bytes),
            tokenizer_hash=self._tokenizer_hash,
            created_s=self._clock(),
        )
        reserve(self._segments, num_bytes)
        segment = self._segments[slot]
        if not segment.lock(timeout_s=self._lock_timeout_s):
            raise SnapshotBusyError(
                f"{segment.path} is still being copied after {self._lock_timeout_s} s; is an actor stopped?"
            )
        self._draft = SnapshotDraft(manifest, segment, finish=self._finish, announce=self._announce, on_end=self._end)
        return self._draft

    def write(self, version: Version, tensors: Mapping[str, np.ndarray], *, dtype: str) -> WeightManifest:
        """Publishes arrays as they are at hand, all cast to one dtype."""
        with self.begin(version, [(name, dtype, a.shape) for name, a in tensors.items()]) as draft:
            cast_all_into((draft.buffer(name), array) for name, array in tensors.items())
            return draft.commit()

    def remove(self) -> None:
        """Closes, and deletes the folder; readers keep what they have mirrored."""
        self.close()
        part_written = self._folder.glob(f".{MANIFEST}.*")  # by a writer that was killed
        for path in (*part_written, *(self._folder / name for name in (MANIFEST, *SLOTS, *DELTAS.values(), WRITER))):
            path.unlink(missing_ok=True)
        self._folder.rmdir()

    def close(self) -> None:
        """Lets the next writer in; the announced snapshot stays."""
        if self._draft is not None:
            self._draft.abort()
        for segment in self._segments:
            segment.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _end(self) -> None:
        self._draft = None

    def _finish(self, manifest: WeightManifest) -> WeightManifest:
        """What is announced of a version that is written and hashed: with a delta, where it gets one, and signed."""
        manifest = dataclasses.replace(manifest, delta=self._write_delta(manifest))
        return manifest if self._token is None else sign(manifest, self._token)

    def _write_delta(self, manifest: WeightManifest) -> DeltaEntry | None:
        """Under the lock of the version's slot, so nobody reads the file whose place the delta takes."""
        base, name = self._base, DELTAS[manifest.file.name]
        path = self._folder / name
        path.unlink(missing_ok=True)
        if base is None or self._num_announced % self._full_every == 0:
            return None
        old, new = (self._data_of(m.file) for m in (base, manifest))
        made = make_delta(base, old, manifest, new, name=name)
        if made is None:
            return None
        try:
            replace_file(path, b"".join(made[1]))
        except OSError as e:  # no room: the version goes out all the same
            logging.warning("no delta for version %s: %s", manifest.version, e)
            return None
        return made[0]

    def _data_of(self, file: FileEntry) -> np.ndarray:
        return self._segments[SLOTS.index(file.name)].bytes_view(file.num_bytes)

    def _announce(self, manifest: WeightManifest) -> None:
        replace_file(self._folder / MANIFEST, codec.encode(manifest))
        self._base = manifest
        self._num_announced += 1


class SnapshotDraft:
    """A version being written; left without `commit`, it is as if it had never begun."""

    def __init__(
        self,
        manifest: WeightManifest,
        segment: Segment,
        *,
        finish: Callable[[WeightManifest], WeightManifest],
        announce: Callable[[WeightManifest], None],
        on_end: Callable[[], None],
    ) -> None:
        """Called by `SnapshotWriter.begin`, with the segment locked."""
        self._manifest, self._segment = manifest, segment
        self._finish, self._announce, self._on_end = finish, announce, on_end
        self._data = segment.bytes_view(manifest.file.num_bytes)
        self._tensors = {t.name: t for t in manifest.tensors}
        self._views: dict[str, np.ndarray] = {}
        self._is_open = True

    @property
    def version(self) -> Version:
        """The version this will be."""
        return self._manifest.version

    def buffer(self, name: str) -> np.ndarray:
        """The tensor's place in the slot, to be filled completely before `commit`.

        It holds what an earlier version left there. Cast straight into it (`cast.cast_into`).

        Raises:
          KeyError: `begin` was not told of this tensor.
          ValueError: the draft was committed or aborted.
        """
        self._check_open()
        if name not in self._views:
            self._views[name] = view(self._data, self._tensors[name])
        return self._views[name]

    def commit(self) -> WeightManifest:
        """Hashes what was written and announces it; from here on readers find this version.

        Raises:
          ValueError: a tensor's buffer was never asked for, so it would be an old version's.
        """
        self._check_open()
        missing = sorted(self._tensors.keys() - self._views.keys())
        if missing:
            raise ValueError(f"version {self.version}: {len(missing)} tensors not written, first {missing[0]}")
        end = 0
        for t in self._manifest.tensors:  # gaps are hashed too: equal weights give equal hashes
            self._data[end : t.offset_bytes] = 0
            end = t.offset_bytes + t.num_bytes
        manifest = self._finish(dataclasses.replace(self._manifest, file=hashed(self._manifest.file, self._data)))
        # Unlocked before the rename: who reads the new manifest must not find the slot locked.
        self._close()
        self._announce(manifest)
        return manifest

    def abort(self) -> None:
        """Gives the slot back; the announced version stays what it was."""
        if self._is_open:
            self._close()

    def __enter__(self) -> "SnapshotDraft":
        """The draft itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Aborts unless it was committed."""
        self.abort()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"version {self.version} was committed or aborted already")

    def _close(self) -> None:
        self._is_open = False
        for buffer in self._views.values():  # a late write would change an announced version
            buffer.flags.writeable = False
        self._on_end()
        self._segment.unlock()
