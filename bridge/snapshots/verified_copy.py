"""Verified local copy of a snapshot, from which a reader maps tensors.

The copy has its own warm file, so a publisher waits only for a copy and never for a model load. The marker
`<file>.manifest` exists only while the file holds that version completely.
"""

import contextlib
import fcntl
import mmap
import os
import pathlib

import blake3
import numpy as np

from bridge import codec
from bridge.files import open_own, replace_file, try_flock
from bridge.snapshots.shard_map import ShardMap, view, zero_gaps
from bridge.snapshots.shared_memory import SharedMemoryFile, each_on_all_cores
from bridge.snapshots.snapshot_format import (
    COPY_BLOCK_BYTES,
    SnapshotBusyError,
    SnapshotError,
    SupersededError,
    TensorTable,
    check_fit,
    latest,
    manifest_path,
    read_manifest,
    reserve,
)
from bridge.weight_types import FileEntry, ShardEntry, WeightManifest


def copy_chunks(fd: int, file: FileEntry, placement: ShardMap, into: np.ndarray) -> list[int]:
    """Copies a shard into the whole file and hashes the data while it is in cache.

    Returns the indices of chunks with a wrong hash. Raises EOFError if the shard's file is too short.
    """

    def copy(index: int) -> bool:
        position, end = file.chunk(index)
        hasher = blake3.blake3()
        while position < end:
            length = min(COPY_BLOCK_BYTES, end - position)
            block = placement.room(into, position, position + length)
            num_read = os.preadv(fd, [block.data], position)
            if num_read == 0:
                raise EOFError(f"ends at byte {position}, {file.num_bytes} expected")
            hasher.update(block[:num_read].data)
            placement.put(block[:num_read], position, into)
            position += num_read
        return hasher.digest() == file.chunk_hash(index)

    return [index for index, is_right in enumerate(each_on_all_cores(copy, range(file.num_chunks))) if not is_right]


class VerifiedCopy:
    """Local file into which one version after another is fetched."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        into: str | os.PathLike[str],
        *,
        run: str,
        tokenizer_hash: str,
        expected: TensorTable | None = None,
        lock_timeout_s: float = 60.0,
    ) -> None:
        """Opens or creates the local file `into`, best in shared memory, and its folder.

        Snapshots with names, dtypes or shapes other than `expected` are rejected. Raises ValueError if another user
        owns the local file, or the path is a link.
        """
        self._folder, self._into = pathlib.Path(folder), pathlib.Path(into)
        self._run, self._tokenizer_hash, self._expected = run, tokenizer_hash, expected
        self._lock_timeout_s = lock_timeout_s
        self._into.parent.mkdir(parents=True, exist_ok=True)
        self._segment = SharedMemoryFile(self._into)

    def fetch(self, manifest: WeightManifest) -> None:
        """Copies a version and verifies the copy; `map_tensors` returns its tensors.

        Raises SupersededError if a newer version was announced, SnapshotBusyError if a process still maps the file, and
        SnapshotError if the run, tokenizer or model differs, or the data does not match its hash.
        """
        check_fit(manifest, run=self._run, tokenizer_hash=self._tokenizer_hash, expected=self._expected)
        reserve([self._segment], manifest.num_bytes)
        if not self._segment.lock(timeout_s=self._lock_timeout_s):
            raise SnapshotBusyError(
                f"{self._into} is still mapped or written after {self._lock_timeout_s} s: "
                "drop the tensors of the last version before fetching the next"
            )
        try:
            manifest_path(self._into).unlink(missing_ok=True)
            if bad := self._copy(manifest, self._segment.bytes_view(manifest.num_bytes)):
                raise SnapshotError(f"version {manifest.version} is corrupt: {bad}")
            replace_file(manifest_path(self._into), codec.encode(manifest))
        finally:
            self._segment.unlock()

    def close(self) -> None:
        """Closes the local file; the file and existing maps stay."""
        self._segment.close()

    def _copy(self, manifest: WeightManifest, into: np.ndarray) -> str:
        """Assembles the data from all shards; returns a description of corrupt chunks, "" if there are none."""
        zero_gaps(into, manifest.tensors)
        with contextlib.ExitStack() as opened:
            fds = [self._open(manifest, piece, opened) for piece in manifest.shards]
            # A writer locks only slots that are not announced, so the bytes of a slot locked here cannot change.
            are_locked = [try_flock(fd, fcntl.LOCK_SH) for fd in fds]
            announced = latest(self._folder)
            if announced != manifest:
                now = announced.version if announced is not None else "no version"
                raise SupersededError(f"version {manifest.version} was superseded: announced is {now}")
            for piece, fd, is_locked in zip(manifest.shards, fds, are_locked, strict=True):
                file = piece.file
                if not is_locked:
                    raise SnapshotBusyError(
                        f"{self._folder / file.name} is announced, but locked by a process that is not its writer"
                    )
                try:
                    bad = copy_chunks(fd, file, ShardMap(manifest.tensors, piece.blocks), into)
                except EOFError as e:
                    path = self._folder / file.name
                    raise SnapshotError(f"version {manifest.version} is corrupt: {path} {e}") from e
                if bad:
                    of = f"of {file.num_chunks} chunks of {file.name}"
                    return f"{len(bad)} {of} do not match their hash, first {bad[0]}"
        return ""

    def _open(self, manifest: WeightManifest, piece: ShardEntry, opened: contextlib.ExitStack) -> int:
        path = self._folder / piece.file.name
        try:
            fd = open_own(path, os.O_RDONLY)
        except ValueError as e:
            raise SnapshotError(str(e)) from e
        except FileNotFoundError as e:
            where = "" if len(manifest.shards) == 1 else "; where the learner has several machines, give --store"
            raise SnapshotError(f"version {manifest.version} is gone: {path} does not exist{where}") from e
        opened.callback(os.close, fd)
        return fd


def is_verified(path: str | os.PathLike[str]) -> WeightManifest | None:
    """Returns the manifest of the complete, verified version in a copy's file; None if there is none."""
    return read_manifest(manifest_path(pathlib.Path(path)))


def map_tensors(path: str | os.PathLike[str], manifest: WeightManifest) -> dict[str, np.ndarray]:
    """Returns the tensors of a verified version as read-only views of the file, without a copy.

    The file stays locked against the next fetch until the last view is released. Raises SnapshotBusyError if a fetch is
    writing the file, and SnapshotError if the file does not hold this version.
    """
    path = pathlib.Path(path)
    try:
        fd = open_own(path, os.O_RDONLY)
    except ValueError as e:
        raise SnapshotError(str(e)) from e
    except FileNotFoundError as e:
        raise SnapshotError(f"{path}: expected version {manifest.version}, but the file does not exist") from e
    try:
        if not try_flock(fd, fcntl.LOCK_SH):
            raise SnapshotBusyError(f"{path} is being written")
        held = is_verified(path)
        if held != manifest or os.fstat(fd).st_size < manifest.num_bytes:
            now = held.version if held is not None else "no whole version"
            raise SnapshotError(f"{path}: expected version {manifest.version}, got {now}")
        # The map holds a duplicate of fd, and with it the lock, for as long as a view exists.
        data = mmap.mmap(fd, manifest.num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)
    whole = np.frombuffer(data, np.uint8)
    return {t.name: view(whole, t) for t in manifest.tensors}
