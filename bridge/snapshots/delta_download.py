"""A version fetched as its delta: compressed chunks from whatever place has them, each proved by what it makes.

A piece has no hash of its own: it is right if and only if the chunk that it makes of the version before has the hash
that is announced. So neither a broken piece nor a wrong base gets through.
"""

import contextlib
import fcntl
import mmap
import os
import pathlib
import threading
from collections.abc import Callable, Generator, Sequence

import numpy as np

from bridge.files import try_flock
from bridge.published import WeightManifest
from bridge.snapshots.chunks import each_on_all_cores, has_chunk
from bridge.snapshots.delta import DeltaError, apply_chunk, check_delta, piece_of
from bridge.snapshots.download import Patience, Pieces, Tally, download
from bridge.snapshots.layout import SnapshotError, manifest_path, read_manifest
from bridge.snapshots.places import Place


@contextlib.contextmanager
def base_of(manifest: WeightManifest, path: pathlib.Path) -> Generator[np.ndarray | None]:
    """The bytes of the version that a delta leads from, locked against being overwritten; None if `path` lacks it."""
    if manifest.delta is None or not path.exists():
        yield None
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not try_flock(fd, fcntl.LOCK_SH) or not _holds_base(path, manifest):
            yield None
        else:
            data = mmap.mmap(fd, manifest.file.num_bytes, prot=mmap.PROT_READ)
            yield np.frombuffer(data, np.uint8)
            fcntl.flock(fd, fcntl.LOCK_UN)  # the map keeps a duplicate of fd
    finally:
        os.close(fd)


def download_delta(
    manifest: WeightManifest,
    base: np.ndarray,
    places: Sequence[tuple[str, Callable[[], Place]]],
    into: np.ndarray,
    *,
    chunks: Sequence[int],
    stop: threading.Event,
    patience: Patience,
    tally: Tally,
) -> list[int]:
    """Makes `chunks` of `into` from `base` and the delta; returns those that could not be made so.

    Raises:
      DeltaError: this build can't apply it.
      SupersededError: no place has the delta (any more).
      StoppedError: `stop` was set.
      SnapshotError: no place could be read for long enough, or what it had was bad again and again.
    """
    delta, file = manifest.delta, manifest.file
    if delta is None:
        raise DeltaError(f"version {manifest.version} has no delta")
    check_delta(delta, full_bytes=file.num_bytes)
    compressed = np.empty(delta.num_bytes, np.uint8)

    def is_right(index: int) -> bool:
        (start, end), (first, last) = file.chunk(index), piece_of(delta, index)
        try:
            apply_chunk(compressed[first:last].data, base[start:end], into[start:end])
        except DeltaError:
            return False
        return has_chunk(into, file, index)

    unchanged = [i for i in chunks if delta.chunk_ends[i] == piece_of(delta, i)[0]]
    are_right = each_on_all_cores(is_right, unchanged)
    pieces = Pieces(
        name=delta.name,
        num=file.num_chunks,
        num_bytes=delta.num_bytes,
        where=lambda index: piece_of(delta, index),
        is_right=is_right,
    )
    changed = sorted(set(chunks) - set(unchanged))
    download(pieces, places, compressed, chunks=changed, stop=stop, patience=patience, tally=tally)
    return [i for i, right in zip(unchanged, are_right, strict=True) if not right]


def _holds_base(path: pathlib.Path, manifest: WeightManifest) -> bool:
    try:
        held = read_manifest(manifest_path(path))
    except SnapshotError:  # damaged, or of another build
        return False
    if held is None or manifest.delta is None:
        return False
    # Longer than its data a file may be; a map of a shorter one would end the process.
    return held.version == manifest.delta.base_version and os.stat(path).st_size >= manifest.file.num_bytes
