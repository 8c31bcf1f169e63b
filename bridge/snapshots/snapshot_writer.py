"""Writer of weight snapshots in shared memory, announced by one rename.

A version is written into the slot that is not announced, hashed, and announced. Until the rename, whatever happens to
the writer, readers find the complete previous version.

Each of several learner hosts has a writer for its own blocks. All hosts seal a version, one joins it (`join`), and it
is announced when all shards exist.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from absl import logging

from bridge import codec
from bridge.credentials import Token
from bridge.files import make_private_folder, open_own, replace_file, try_flock
from bridge.rollout_types import Version
from bridge.snapshots.delta import make_delta
from bridge.snapshots.shard_map import ShardMap, lay_out
from bridge.snapshots.shared_memory import SharedMemoryFile
from bridge.snapshots.snapshot_draft import SnapshotDraft
from bridge.snapshots.snapshot_format import (
    CHUNK_BYTES,
    MANIFEST,
    HostFiles,
    SnapshotBusyError,
    SnapshotError,
    check_layout,
    delta_of,
    hashed,
    latest,
    reserve,
    sign,
    unhashed,
)
from bridge.weight_types import (
    Block,
    DeltaEntry,
    FileEntry,
    ShardEntry,
    WeightManifest,
    deciding_base_steps,
)

_SPARE_AFTER_S = 1.0
"""Seconds to wait for a reader before a third slot is used. A copy within a machine is faster."""
_SPARE_AGAIN_S = 1.0
"""Seconds between two attempts to reserve the third slot. Memory may become free; the server then keeps the other slot
for slow readers."""
_POLL_S = 0.001


class SnapshotWriter:
    """Publisher of one snapshot folder; only one process may publish there. Not thread-safe."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str,
        tokenizer_hash: str,
        lock_timeout_s: float = 60.0,
        token: Token | None = None,
        full_every: int = 1,
        has_spare: bool = False,
        host: int = 0,
        num_hosts: int = 1,
        base_steps: Mapping[int, int] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates the folder, or takes it over from a dead writer of the same run. The announced snapshot stays.

        Raises SnapshotError if another writer is live or the folder holds another run's snapshots, and ValueError if
        the folder, or a file in it, is not private to this user.

        Args:
          lock_timeout_s: seconds to wait for readers of a slot.
          token: signs manifests, as actors on other machines require; None: no signature.
          full_every: every `full_every`-th version of this writer, starting with the first, has no delta.
          has_spare: allocate a third slot when a version is due while the free slot is still being read. It stays
            allocated.
          host: index of this process among the learner's; hosts of one machine share the folder.
          base_steps: step that each incarnation of the learner began at.
          clock: returns Unix seconds.
        """
        self._folder = pathlib.Path(folder)
        self._run, self._tokenizer_hash = run, tokenizer_hash
        self._lock_timeout_s, self._chunk_bytes, self._clock = lock_timeout_s, chunk_bytes, clock
        self._token, self._full_every = token, full_every
        self._base_steps = deciding_base_steps(base_steps or {})
        self._base: WeightManifest | None = None
        self._num_announced = 0
        self._draft: SnapshotDraft | None = None
        self._segments: dict[str, SharedMemoryFile] = {}
        self._host, self._files = host, HostFiles(host)
        make_private_folder(self._folder)
        self._lock_fd = open_own(self._folder / self._files.writer, os.O_RDWR | os.O_CREAT)
        try:
            if not try_flock(self._lock_fd, fcntl.LOCK_EX):
                raise SnapshotError(f"another live process publishes into {self._folder}")
            announced = latest(self._folder)
            if announced is not None and announced.run != run:
                raise SnapshotError(
                    f"{self._folder} holds snapshots of run {announced.run!r}, this is {run!r}: "
                    "remove the folder or choose another"
                )
            names = [name for name in self._files.slots if has_spare or name != self._files.spare]
            self._segments = {name: SharedMemoryFile(self._folder / name) for name in names}
            _sweep(self._folder, num_hosts)
        except BaseException:
            self.close()
            raise

    def begin(
        self, version: Version, entries: Iterable[tuple[str, str, Sequence[int]]], blocks: Sequence[Block]
    ) -> SnapshotDraft:
        """Starts a version of the given (name, dtype, shape) tensors; waits for slow readers.

        `blocks` is the part that this host writes.

        Raises:
          ValueError: the version is not newer than the announced one, a dtype is not supported, or a draft is still
            open.
          SnapshotError: too little memory is free.
          SnapshotBusyError: a reader did not finish in time.
        """
        if self._draft is not None:
            raise ValueError(f"version {self._draft.version} is neither sealed nor aborted")
        announced = latest(self._folder)
        if announced is not None and version <= announced.version:
            raise ValueError(f"version {version} is not newer than the announced {announced.version}")
        tensors, _ = lay_out(entries)
        placement = ShardMap(tensors, blocks)
        num_bytes = placement.num_bytes
        reserve([segment for name, segment in self._segments.items() if name != self._files.spare], num_bytes)
        own = None if announced is None else _piece_of(announced, self._host)
        segment = self._lock_free("" if own is None else own.file.name, num_bytes)
        file = unhashed(segment.path.name, num_bytes, smallest=self._chunk_bytes)
        manifest = WeightManifest(
            run=self._run,
            version=version,
            tensors=tensors,
            shards=(ShardEntry(host=self._host, blocks=tuple(blocks), file=file),),
            tokenizer_hash=self._tokenizer_hash,
            created_s=self._clock(),
        )
        self._draft = SnapshotDraft(manifest, placement, segment, seal=self._seal, end=self._end)
        return self._draft

    def join(self, parts: Sequence[WeightManifest]) -> WeightManifest:
        """Returns the manifest of a version that all hosts have sealed, signed if there is a token.

        Raises SnapshotError if the parts are of different versions or models, or do not make up a complete version.
        """
        first = parts[0]
        if any(dataclasses.replace(p, shards=first.shards, created_s=first.created_s) != first for p in parts):
            raise SnapshotError(f"version {first.version}: the hosts' pieces belong to different snapshots")
        pieces = sorted((piece for part in parts for piece in part.shards), key=lambda piece: piece.host)
        whole = dataclasses.replace(first, shards=tuple(pieces), base_steps=self._base_steps)
        check_layout(whole)
        return whole if self._token is None else sign(whole, self._token)

    def announce(self, manifest: WeightManifest) -> None:
        """Makes a version visible to readers. All of its shards must exist."""
        replace_file(self._folder / MANIFEST, codec.encode(manifest))
        self._base = manifest
        self._num_announced += 1

    def _seal(self, part: WeightManifest, data: np.ndarray) -> WeightManifest:
        """Adds hashes and, if due, a delta. Runs under the slot's lock, so no reader has the old delta file open."""
        (piece,) = part.shards
        part = dataclasses.replace(part, shards=(dataclasses.replace(piece, file=hashed(piece.file, data)),))
        (piece,) = part.shards
        return dataclasses.replace(part, shards=(dataclasses.replace(piece, delta=self._write_delta(part)),))

    def _end(self) -> None:
        self._draft = None

    def remove(self) -> None:
        """Closes the writer and deletes the folder unless it contains foreign files; readers keep their copies."""
        self.close()
        names = (MANIFEST, *self._files.all)
        part_written = tuple(f".{name}." for name in names)  # left by killed writers
        with contextlib.suppress(FileNotFoundError):  # another host, closing at the same time, deleted the folder
            for name in os.listdir(self._folder):
                if name in names or name.startswith(part_written):
                    (self._folder / name).unlink(missing_ok=True)
            try:
                self._folder.rmdir()
            except OSError as e:  # the published files are deleted, so this is not a failure
                if not any(name.startswith("writer") for name in os.listdir(self._folder)):  # else another host does it
                    logging.warning("snapshot folder not deleted: %s", e)

    def close(self) -> None:
        """Releases the folder to the next writer; the announced snapshot stays."""
        if self._draft is not None:
            self._draft.abort()
        for segment in self._segments.values():
            segment.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock_free(self, announced: str, num_bytes: int) -> SharedMemoryFile:
        """Returns a locked slot that is not announced, as soon as its last reader has finished."""
        name_of_spare = self._files.spare
        free = [segment for name, segment in self._segments.items() if name not in (announced, name_of_spare)]
        spare = None if announced == name_of_spare else self._segments.get(name_of_spare)
        try_spare_s = 0.0 if spare is not None and spare.missing_bytes(num_bytes) == 0 else _SPARE_AFTER_S
        is_told = False
        begin_s = time.monotonic()
        while True:
            if (found := next((s for s in free if s.lock(timeout_s=0)), None)) is not None:
                return found
            waited_s = time.monotonic() - begin_s
            if waited_s >= self._lock_timeout_s:
                raise SnapshotBusyError(
                    f"timed out after {self._lock_timeout_s} s waiting for readers of {free[0].path}; "
                    "check for a suspended actor"
                )
            if spare is not None and waited_s >= try_spare_s:
                try:
                    reserve([spare], num_bytes)
                    free.append(spare)
                    spare = None
                except SnapshotError as e:  # too little memory: the server keeps no slot either (`SlotLocks`)
                    if not is_told:
                        logging.warning("no third slot for slow readers: %s", e)
                    is_told, try_spare_s = True, waited_s + _SPARE_AGAIN_S
            time.sleep(_POLL_S)

    def _write_delta(self, part: WeightManifest) -> DeltaEntry | None:
        (piece,) = part.shards
        old = None if self._base is None else _piece_of(self._base, self._host)
        name = delta_of(piece.file.name)
        path = self._folder / name
        path.unlink(missing_ok=True)
        if self._base is None or old is None or self._num_announced % self._full_every == 0:
            return None
        base = dataclasses.replace(self._base, shards=(old,))
        made = make_delta(base, self._data_of(old.file), part, self._data_of(piece.file), name=name)
        if made is None:
            return None
        try:
            replace_file(path, b"".join(made[1]))
        except OSError as e:  # too little memory: publish the version without a delta
            logging.warning("no delta for version %s: %s", part.version, e)
            return None
        return made[0]

    def _data_of(self, file: FileEntry) -> np.ndarray:
        return self._segments[file.name].bytes_view(file.num_bytes)


def _piece_of(manifest: WeightManifest, host: int) -> ShardEntry | None:
    return next((piece for piece in manifest.shards if piece.host == host), None)


def _sweep(folder: pathlib.Path, num_hosts: int) -> None:
    """Removes files of dead processes from a time when the learner had more hosts."""
    for lock in folder.glob("writer.host-*"):
        host = lock.name.rpartition("-")[2]
        if not host.isdigit() or int(host) < num_hosts:
            continue
        fd = open_own(lock, os.O_RDWR)
        if try_flock(fd, fcntl.LOCK_EX):
            for name in HostFiles(int(host)).all:
                (folder / name).unlink(missing_ok=True)
        os.close(fd)
