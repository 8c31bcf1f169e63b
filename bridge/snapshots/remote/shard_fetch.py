"""Fetch of one shard, in full or by its delta, with resume of broken downloads.

A delta's chunk has no hash of its own. It is valid only if the reconstructed chunk has the announced hash, so a corrupt
delta or a wrong base is detected.

Existing chunks are not fetched again: chunks of a broken download, and chunks unchanged since the file's previous
version. If another file holds the delta's base version, the delta is fetched instead of the remaining chunks.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import mmap
import os
import pathlib
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import blake3
import numpy as np
from absl import logging

from bridge.files import try_flock
from bridge.rollout_types import Version
from bridge.snapshots.delta import DeltaError, apply_chunk, check_delta, compressed_range
from bridge.snapshots.remote.download import (
    Chunks,
    DownloadStats,
    DownloadStoppedError,
    ObjectSource,
    RetryPolicy,
    Stop,
    download,
)
from bridge.snapshots.shard_map import ShardMap
from bridge.snapshots.shared_memory import each_on_all_cores
from bridge.snapshots.snapshot_format import SnapshotError, is_chunk, manifest_path, part_path, read_manifest
from bridge.weight_types import DeltaEntry, ShardEntry, WeightManifest


@contextlib.contextmanager
def base_in(path: pathlib.Path, manifest: WeightManifest) -> Generator[tuple[Version, np.ndarray] | None]:
    """Yields a file's version and bytes, locked against overwriting; None if no delta of `manifest` has it as base."""
    if not path.exists():
        yield None
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not try_flock(fd, fcntl.LOCK_SH) or (version := _held_base(path, manifest)) is None:
            yield None
        else:
            data = mmap.mmap(fd, manifest.num_bytes, prot=mmap.PROT_READ)
            try:
                yield version, np.frombuffer(data, np.uint8)
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # the map keeps a duplicate of fd
    finally:
        os.close(fd)


def _held_base(path: pathlib.Path, manifest: WeightManifest) -> Version | None:
    try:
        held = read_manifest(manifest_path(path))
    except SnapshotError:  # corrupt, or of another build
        return None
    bases = {piece.delta.base_version for piece in manifest.shards if piece.delta is not None}
    if held is None or held.version not in bases:
        return None
    # A file may be longer than its data. Mapping a shorter file would crash the process.
    return held.version if os.stat(path).st_size >= manifest.num_bytes else None


MAX_AT_ONCE = 64
"""Most shards that are fetched concurrently. Hosts keep a version for slow readers whose fetch has begun, so one that
is slower than the publishes gets complete versions of at most so many hosts."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class ReusableData:
    """Data of a file that a fetch into it may reuse; every chunk is verified by its hash."""

    is_part: bool
    """True if a download into the file broke off, so that any chunk may exist."""
    manifest: WeightManifest | None
    """Manifest of the complete version in the file; None if there is none."""

    @classmethod
    def marker(cls, into: pathlib.Path) -> "ReusableData":
        """Reads the markers next to a file."""
        return cls(part_path(into).exists(), held_in(into))


class ShardFetch:
    """Fetch of one shard."""

    def __init__(
        self,
        manifest: WeightManifest,
        piece: ShardEntry,
        places: Sequence[tuple[str, Callable[[], ObjectSource]]],
        whole: np.ndarray,
        *,
        patience: RetryPolicy,
    ) -> None:
        """Prepares a fetch into the bytes of the `whole` file. `places`: (name, opener) of sources, best first."""
        self.piece, self.tally = piece, DownloadStats()
        self._manifest, self._places, self._whole, self._patience = manifest, places, whole, patience
        self._placement = ShardMap(manifest.tensors, piece.blocks)

    def run(self, *, held: ReusableData, before: tuple[Version, np.ndarray] | None, stop: Stop) -> None:
        """Fetches and verifies the shard. Blocks its thread, and raises as `download`.

        Chunks of `held` with the right hash are not downloaded. `before` is another version and the bytes of its whole
        file, to which a delta can be applied.
        """
        file, there = self.piece.file, self._chunks_there(held)
        missing = [i for i in range(file.num_chunks) if i not in there]
        missing = self._by_delta(before, missing, stop)
        self._download(Chunks.of(file, self._placement, self._whole), missing, stop)

    def _download(self, chunks: Chunks, wanted: list[int], stop: Stop) -> None:
        download(chunks, self._places, wanted=wanted, stop=stop, patience=self._patience, tally=self.tally)

    def _chunks_there(self, held: ReusableData) -> set[int]:
        """Returns the chunks that need not be fetched, each verified by its hash."""
        file = self.piece.file
        candidates: list[int] = []
        if held.is_part:
            candidates = list(range(file.num_chunks))
        elif (old := self._like_piece(held.manifest)) is not None:
            num_common = min(old.file.num_chunks, file.num_chunks)
            candidates = [i for i in range(num_common) if old.file.chunk_hash(i) == file.chunk_hash(i)]
        is_there = each_on_all_cores(self._is_there, candidates)
        return {i for i, there in zip(candidates, is_there, strict=True) if there}

    def _is_there(self, index: int) -> bool:
        start, end = self.piece.file.chunk(index)
        return is_chunk(self._placement.gather(self._whole, start, end), self.piece.file, index)

    def _like_piece(self, manifest: WeightManifest | None) -> ShardEntry | None:
        if manifest is None or manifest.tensors != self._manifest.tensors:
            return None
        for old in manifest.shards:
            if (old.blocks, old.file.chunk_bytes) == (self.piece.blocks, self.piece.file.chunk_bytes):
                return old
        return None

    def _by_delta(self, before: tuple[Version, np.ndarray] | None, missing: list[int], stop: Stop) -> list[int]:
        """Reconstructs chunks from the previous version; returns the chunks that are still missing."""
        delta = self.piece.delta
        if before is None or delta is None or delta.base_version != before[0] or not missing:
            return missing
        try:
            left = self._apply_delta(delta, before[1], missing, stop)
        except DownloadStoppedError:
            raise
        except SnapshotError as e:
            version = self._manifest.version
            logging.warning("delta failed, fetching the full file version=%s reason=%s", version, e)
            left = [i for i in missing if not self._is_there(i)]
        self.tally.num_by_delta = len(missing) - len(left)
        self.tally.num_failed_deltas = int(bool(left))
        return left

    def _apply_delta(self, delta: DeltaEntry, base: np.ndarray, wanted: list[int], stop: Stop) -> list[int]:
        """Reconstructs chunks from the previous version and the delta; returns the unchanged chunks that failed."""
        file, placement = self.piece.file, self._placement
        check_delta(delta, full_bytes=file.num_bytes)

        def accept(index: int, compressed: np.ndarray) -> bool:
            start, end = file.chunk(index)
            chunk = placement.room(self._whole, start, end)
            try:
                apply_chunk(compressed.data, placement.gather(base, start, end), chunk)
            except DeltaError:
                return False
            if not is_chunk(chunk, file, index):
                return False
            placement.put(chunk, start, self._whole)
            return True

        nothing = np.empty(0, np.uint8)
        unchanged = [i for i in wanted if delta.chunk_ends[i] == compressed_range(delta, i)[0]]
        are_right = each_on_all_cores(lambda i: accept(i, nothing), unchanged)
        chunks = Chunks(
            name=delta.name,
            num=file.num_chunks,
            num_bytes=delta.num_bytes,
            where=lambda index: compressed_range(delta, index),
            room=lambda start, end: np.empty(end - start, np.uint8),
            accept=accept,
        )
        self._download(chunks, sorted(set(wanted) - set(unchanged)), stop)
        return [i for i, right in zip(unchanged, are_right, strict=True) if not right]


def num_connections(num_pieces: int, patience: RetryPolicy) -> int:
    """Returns the number of concurrent connections of one reader to all hosts for `num_pieces` shards."""
    at_once = min(MAX_AT_ONCE, num_pieces)
    return at_once * patience.shared_by(at_once).num_ranges


def rotated(pieces: Sequence[T], reader: str) -> list[T]:
    """Returns the shards in the order in which a reader fetches them.

    All readers see a new version at the same moment. The hash of a reader's name selects its first shard, so that
    readers spread over the learner's hosts.
    """
    start = int.from_bytes(blake3.blake3(reader.encode()).digest()[:8]) % max(1, len(pieces))
    return [*pieces[start:], *pieces[:start]]


def fetch_all(
    fetches: Sequence[ShardFetch],
    *,
    held: ReusableData,
    before: tuple[Version, np.ndarray] | None,
    stop: Stop,
    reader: str = socket.gethostname(),
) -> None:
    """Runs all fetches in threads, in this machine's order (`rotated`).

    If one fetch fails, the others stop soon, and the first failure is raised; verified chunks are kept.
    """
    if len(fetches) == 1:
        return fetches[0].run(held=held, before=before, stop=stop)
    failed = threading.Event()
    errors: list[BaseException] = []

    def run(fetch: ShardFetch) -> None:
        try:
            fetch.run(held=held, before=before, stop=_Any(stop, failed))
        except BaseException as e:
            if isinstance(e, SnapshotError) and not isinstance(e, DownloadStoppedError):
                e = type(e)(f"piece of host {fetch.piece.host}: {e}")
            errors.append(e)
            failed.set()

    with concurrent.futures.ThreadPoolExecutor(min(MAX_AT_ONCE, len(fetches)), "sluice-piece") as threads:
        for fetch in rotated(fetches, reader):
            threads.submit(run, fetch)
    if errors:
        raise errors[0]
    return None


def held_in(into: pathlib.Path) -> WeightManifest | None:
    """Returns the manifest of the complete version in a file; None if there is none or it is unreadable."""
    try:
        return read_manifest(manifest_path(into))
    except SnapshotError:  # corrupt, or of another build: fetch it again
        return None


class _Any:
    def __init__(self, *events: Stop) -> None:
        self._events = events

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)
