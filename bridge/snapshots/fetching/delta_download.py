"""A version fetched as its delta: compressed chunks from whatever place has them, each proved by what it makes.

A piece has no hash of its own: it is right if and only if the chunk that it makes of the version before has the hash
that is announced. So neither a broken piece nor a wrong base gets through.
"""

import contextlib
import fcntl
import mmap
import os
import pathlib
from collections.abc import Callable, Generator, Sequence

import numpy as np

from bridge.files import try_flock
from bridge.published import PieceEntry, WeightManifest
from bridge.snapshots.chunks import each_on_all_cores, is_chunk
from bridge.snapshots.delta import DeltaError, apply_chunk, check_delta, compressed_range
from bridge.snapshots.fetching.download import Chunks, Patience, Stop, Tally, download
from bridge.snapshots.fetching.places import Place
from bridge.snapshots.layout import SnapshotError, manifest_path, read_manifest
from bridge.snapshots.placement import Placement
from bridge.types import Version


@contextlib.contextmanager
def base_in(path: pathlib.Path, manifest: WeightManifest) -> Generator[tuple[Version, np.ndarray] | None]:
    """The version that a file holds and its bytes, locked against being overwritten; None if no delta leads from it.

    Args:
      path: the file.
      manifest: of the version that is to be fetched.
    """
    if not path.exists():
        yield None
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not try_flock(fd, fcntl.LOCK_SH) or (version := _held_base(path, manifest)) is None:
            yield None
        else:
            data = mmap.mmap(fd, manifest.num_bytes, prot=mmap.PROT_READ)
            yield version, np.frombuffer(data, np.uint8)
            fcntl.flock(fd, fcntl.LOCK_UN)  # the map keeps a duplicate of fd
    finally:
        os.close(fd)


def download_delta(
    piece: PieceEntry,
    placement: Placement,
    base: np.ndarray,
    places: Sequence[tuple[str, Callable[[], Place]]],
    whole: np.ndarray,
    *,
    wanted: Sequence[int],
    stop: Stop,
    patience: Patience,
    tally: Tally,
) -> list[int]:
    """Makes chunks of a piece from the version before and the delta; returns those that could not be made so.

    Args:
      piece: which one; it has a delta.
      placement: where it lies in the whole file.
      base: the whole file of the version that the delta leads from.
      places: where the piece is, the best one first.
      whole: the whole file that is to be.
      wanted: the chunks to make, by index.
      stop: once set, the download ends within a moment.
      patience: with places that fail.
      tally: what it takes is added here.

    Raises:
      DeltaError: this build can't apply it.
      SupersededError: no place has the delta (any more).
      StoppedError: `stop` was set.
      SnapshotError: no place could be read for long enough, or what it had was bad again and again.
    """
    delta, file = piece.delta, piece.file
    if delta is None:
        raise DeltaError(f"{file.name} has no delta")
    check_delta(delta, full_bytes=file.num_bytes)

    def accept(index: int, compressed: np.ndarray) -> bool:
        start, end = file.chunk(index)
        chunk = placement.room(whole, start, end)
        try:
            apply_chunk(compressed.data, placement.gather(base, start, end), chunk)
        except DeltaError:
            return False
        if not is_chunk(chunk, file, index):
            return False
        placement.put(chunk, start, whole)
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
    changed = sorted(set(wanted) - set(unchanged))
    download(chunks, places, wanted=changed, stop=stop, patience=patience, tally=tally)
    return [i for i, right in zip(unchanged, are_right, strict=True) if not right]


def _held_base(path: pathlib.Path, manifest: WeightManifest) -> Version | None:
    try:
        held = read_manifest(manifest_path(path))
    except SnapshotError:  # damaged, or of another build
        return None
    bases = {piece.delta.base_version for piece in manifest.pieces if piece.delta is not None}
    if held is None or held.version not in bases:
        return None
    # Longer than its data a file may be; a map of a shorter one would end the process.
    return held.version if os.stat(path).st_size >= manifest.num_bytes else None
