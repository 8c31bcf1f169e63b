"""What a snapshot folder looks like, for its writer and its readers alike.

manifest            the announced snapshot (a `WeightManifest`), replaced by one rename
slot-0, slot-1      tensor data; the manifest names one, the other may be half-written
delta-0, delta-1    what leads to a slot's data from the version before, if the manifest names it
writer              held locked by the one process that publishes here
"""

import math
import os
import pathlib
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from bridge import codec
from bridge.published import TensorEntry, WeightManifest
from bridge.snapshots.chunks import MAX_CHUNKS, hash_of_hashes
from bridge.snapshots.segment import ALIGN_BYTES, Segment
from bridge.types import Version

MANIFEST = "manifest"
SLOTS = ("slot-0", "slot-1")
DELTAS = {"slot-0": "delta-0", "slot-1": "delta-1"}
"""The delta that leads to what a slot holds, and is written under that slot's lock."""
WRITER = "writer"
"""Locked by the one live writer."""
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

TensorTable = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype name, shape)."""


class SnapshotError(RuntimeError):
    """A snapshot that cannot be written, or must not be used."""


class SupersededError(SnapshotError):
    """A newer version was announced meanwhile: take that one."""


class UnreachableError(SnapshotError):
    """None of a version's sources could be read for long; that says nothing against the version."""


class SnapshotBusyError(SnapshotError):
    """Somebody kept a lock for longer than the deadline."""


def latest(folder: str | os.PathLike[str]) -> WeightManifest | None:
    """The announced snapshot's manifest, None before the first one; one small file is read.

    Raises:
      SnapshotError: the manifest is damaged or of another format.
    """
    return read_manifest(pathlib.Path(folder) / MANIFEST)


def read_manifest(path: pathlib.Path) -> WeightManifest | None:
    """A manifest file's contents; None if there is no such file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return codec.decode(WeightManifest, data)
    except ValueError as e:
        raise SnapshotError(f"{path} cannot be read; if no run uses it, delete it: {e}") from e


def manifest_path(into: pathlib.Path) -> pathlib.Path:
    """Where it is written which version a reader's copy holds; there only while the copy is whole."""
    return into.with_name(f"{into.name}.manifest")


def part_path(into: pathlib.Path) -> pathlib.Path:
    """Where it is written which version a reader's copy is being filled with; there only while it is not whole."""
    return into.with_name(f"{into.name}.part")


def place_of(base: str, run: str, version: Version) -> str:
    """The URL under which a version's files lie, on the server or in the bucket at `base`."""
    return f"{base.rstrip('/')}/v1/{urllib.parse.quote(run, safe='')}/{version}"


def lay_out(entries: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Places tensors one after another at aligned offsets; returns them and the total in bytes.

    Raises:
      ValueError: a dtype that is not served, or no bytes at all.
    """
    tensors: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in entries:
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype!r}, served are {sorted(DTYPES)}")
        offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        tensors.append(
            TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset_bytes=offset, num_bytes=num_bytes)
        )
        end = offset + num_bytes
    if end == 0:
        raise ValueError("a snapshot needs at least one tensor that is not empty")
    return tuple(tensors), end


def view(data: np.ndarray, tensor: TensorEntry) -> np.ndarray:
    """A tensor's part of the data file's bytes, in its dtype and shape; no copy."""
    raw = data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def check_layout(manifest: WeightManifest) -> None:
    """Refuses a manifest that would be read outside its tensors, or that contradicts itself.

    Raises:
      SnapshotError: it names a foreign file, is empty, larger than its tensors, a tensor's size is not its shape's,
        or its chunks are too many or not those that its hash is of.
    """
    if manifest.file.name not in SLOTS:
        raise SnapshotError(f"version {manifest.version} names the file {manifest.file.name!r}, not a slot")
    if manifest.file.num_bytes == 0:
        raise SnapshotError(f"version {manifest.version} has no data")
    if manifest.file.num_chunks > MAX_CHUNKS:
        raise SnapshotError(f"version {manifest.version} has {manifest.file.num_chunks} chunks, limit {MAX_CHUNKS}")
    room = sum(-(-t.num_bytes // ALIGN_BYTES) * ALIGN_BYTES for t in manifest.tensors)
    if manifest.file.num_bytes > room:
        raise SnapshotError(
            f"version {manifest.version} has {manifest.file.num_bytes} bytes, its tensors need {room} at most"
        )
    if hash_of_hashes(manifest.file.chunk_hashes) != manifest.file.blake3:
        raise SnapshotError(
            f"version {manifest.version} is corrupt: its digests are not what {manifest.file.blake3} is of"
        )
    for t in manifest.tensors:
        fits = (
            t.dtype in DTYPES
            and all(n >= 0 for n in t.shape)
            and math.prod(t.shape) * DTYPES[t.dtype].itemsize == t.num_bytes
            and t.offset_bytes % ALIGN_BYTES == 0
        )
        if not fits:
            raise SnapshotError(f"version {manifest.version} has a malformed tensor: {t}")


def check_table(manifest: WeightManifest, expected: TensorTable) -> None:
    """Refuses a snapshot whose names, dtypes or shapes are not exactly the expected ones.

    Raises:
      SnapshotError: says which tensor differs first and how many do.
    """
    got = {t.name: (t.dtype, t.shape) for t in manifest.tensors}
    want = {name: (dtype, tuple(shape)) for name, (dtype, shape) in expected.items()}
    wrong = sorted(name for name in got.keys() | want.keys() if got.get(name) != want.get(name))
    if wrong:
        name = wrong[0]
        raise SnapshotError(
            f"version {manifest.version} differs from the model in {len(wrong)} tensors, first {name}: "
            f"got {got.get(name, 'nothing')}, wanted {want.get(name, 'nothing')}"
        )


def check_fit(manifest: WeightManifest, *, run: str, tokenizer_hash: str, expected: TensorTable | None) -> None:
    """Refuses, before anything is allocated or read, what is not a snapshot of this run and this model.

    Raises:
      SnapshotError: another run or tokenizer, a malformed manifest, or other tensors than `expected`, where given.
    """
    for what, got, want in (
        ("run", manifest.run, run),
        ("tokenizer hash", manifest.tokenizer_hash, tokenizer_hash),
    ):
        if got != want:
            raise SnapshotError(f"version {manifest.version} has {what} {got!r}, wanted {want!r}")
    check_layout(manifest)
    if expected is not None:
        check_table(manifest, expected)


def reserve(segments: Sequence[Segment], num_bytes: int) -> None:
    """Makes each segment at least so large and warm.

    Raises:
      SnapshotError: their file system has too little room.
    """
    folder = segments[0].path.parent
    stat = os.statvfs(folder)
    available = stat.f_bavail * stat.f_frsize
    needed = sum(s.missing_bytes(num_bytes) for s in segments)
    complaint = f"{folder} needs {needed} bytes more for snapshots, {available} are available"
    if needed > available:
        raise SnapshotError(complaint)
    try:
        for segment in segments:
            segment.reserve(num_bytes)
    except OSError as e:
        raise SnapshotError(f"{complaint}: {e}") from e
