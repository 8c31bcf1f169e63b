"""Snapshot format: folder layout, chunk hashes, manifest checks, signatures and errors.

manifest            announced snapshot (a `WeightManifest`), replaced by one rename
slot-0, slot-1      tensor data; the manifest names one, another may be incomplete
slot-2              additional slot, if a version is kept for slow readers
delta-0, ...        delta from the previous version to a slot's data, if the manifest names it
writer              locked by the one process that publishes here

Files of the learner's process 3 are slot-0.host-3 and so on, because hosts of one machine share a folder, and all hosts
share a bucket.

Data files have no signature, because the signed manifest holds their hashes. A signed message contains its type, so a
signature of one type is not valid for another.
"""

import dataclasses
import math
import os
import pathlib
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import TypeVar

import blake3
import numpy as np

from bridge import codec
from bridge.credentials import TOKEN_FILE, Token
from bridge.files import open_own
from bridge.rollout_types import Version
from bridge.snapshots.shard_map import DTYPES, ShardMap, aligned, check_tiling
from bridge.snapshots.shared_memory import SharedMemoryFile, each_on_all_cores
from bridge.weight_types import Announcement, FileEntry, ShardEntry, WeightManifest

CHUNK_BYTES = 4 * 2**20
"""Chunk size, unless a file would exceed MAX_CHUNKS. Large enough to make Python's overhead negligible, and small
enough to repeat a chunk cheaply."""
MAX_CHUNKS = 4096
"""Most chunks of one file: 128 KiB of digests in a manifest."""


# A block is copied and hashed while it is in the L2 cache.
COPY_BLOCK_BYTES = 256 * 2**10


def chunk_bytes_of(num_bytes: int, *, smallest: int = CHUNK_BYTES) -> int:
    """Returns a file's chunk size: `smallest` times the lowest power of two that gives at most MAX_CHUNKS chunks."""
    size = smallest
    while num_bytes > size * MAX_CHUNKS:
        size *= 2
    return size


def unhashed(name: str, num_bytes: int, *, smallest: int = CHUNK_BYTES) -> FileEntry:
    """Returns the entry of a file that is not written yet."""
    chunk_bytes = chunk_bytes_of(num_bytes, smallest=smallest)
    hashes = bytes(blake3.blake3.digest_size * -(-num_bytes // chunk_bytes))
    return FileEntry(name=name, num_bytes=num_bytes, chunk_bytes=chunk_bytes, chunk_hashes=hashes, blake3="")


def hashed(file: FileEntry, data: np.ndarray) -> FileEntry:
    """Returns the entry with the digests of the file's content, in one pass over `data`, a uint8 vector."""

    def digest(index: int) -> bytes:
        start, end = file.chunk(index)
        return blake3.blake3(data[start:end].data).digest()

    hashes = b"".join(each_on_all_cores(digest, range(file.num_chunks)))
    return FileEntry(
        name=file.name,
        num_bytes=file.num_bytes,
        chunk_bytes=file.chunk_bytes,
        chunk_hashes=hashes,
        blake3=hash_of_hashes(hashes),
    )


def hash_of_hashes(chunk_hashes: bytes) -> str:
    """Returns `FileEntry.blake3` for the digests of a file's chunks."""
    return blake3.blake3(chunk_hashes).hexdigest()


def is_chunk(chunk: np.ndarray, file: FileEntry, index: int) -> bool:
    """Returns True if the bytes have the chunk's hash."""
    return blake3.blake3(chunk.data).digest() == file.chunk_hash(index)


MANIFEST = "manifest"


class HostFiles:
    """File names of one learner process in a snapshot folder."""

    def __init__(self, host: int = 0) -> None:
        of_host = f".host-{host}" if host else ""
        self.spare = f"slot-2{of_host}"
        """Empty until needed; missing if slow readers get no grace period."""
        self.slots = (f"slot-0{of_host}", f"slot-1{of_host}", self.spare)
        self.writer = f"writer{of_host}"
        """Locked by the one live writer."""
        self.all = (*(delta_of(slot) for slot in self.slots), *self.slots, self.writer)


def delta_of(slot: str) -> str:
    """Returns the name of the delta to a slot's data, which is written under the slot's lock."""
    return slot.replace("slot", "delta", 1)


TensorTable = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (dtype name, shape)."""


class SnapshotError(RuntimeError):
    """Error for a snapshot that cannot be written, or must not be used."""


class SupersededError(SnapshotError):
    """Error for a version that a newer announced version replaced; the caller should use the newer one."""


class UnreachableError(SnapshotError):
    """Error for a version whose sources were all unreachable for long; the version itself may be valid."""


class SnapshotBusyError(SnapshotError):
    """Error for a lock that another process held past the deadline."""


def latest(folder: str | os.PathLike[str]) -> WeightManifest | None:
    """Returns the announced snapshot's manifest; None before the first. Raises as `read_manifest`."""
    return read_manifest(pathlib.Path(folder) / MANIFEST)


def read_manifest(path: pathlib.Path) -> WeightManifest | None:
    """Returns the content of a manifest file; None if the file does not exist.

    Raises SnapshotError if the file is corrupt, has another format, or belongs to another user.
    """
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise SnapshotError(str(e)) from e
    try:
        return codec.decode(WeightManifest, data)
    except ValueError as e:
        raise SnapshotError(f"{path} cannot be read; if no run uses it, delete it: {e}") from e


def manifest_path(into: pathlib.Path) -> pathlib.Path:
    """Returns the marker of the version in a reader's copy; it exists only while the copy is complete."""
    return into.with_name(f"{into.name}.manifest")


def part_path(into: pathlib.Path) -> pathlib.Path:
    """Returns the marker of an incomplete copy: the version that the file is being filled with."""
    return into.with_name(f"{into.name}.part")


def version_url(base: str, run: str, version: Version) -> str:
    """Returns the URL of a version's files on the server or in the bucket at `base`."""
    return f"{base.rstrip('/')}/v1/{urllib.parse.quote(run, safe='')}/{version}"


def older_place(announcement: Announcement) -> tuple[Version, str] | None:
    """Returns the newest older version among an announcement's sources, and its URL; None if there is none."""
    return max(_older(announcement), default=None)


def own_sources(announcement: Announcement, piece: int) -> tuple[str, ...]:
    """Returns the sources of the announced version or of its shard `piece`; sources of the shard's host come first."""
    older = {url for _, url in _older(announcement)}
    of_piece = announcement.host_sources[piece] if announcement.host_sources else ()
    return (*of_piece, *(s for s in announcement.sources if s not in older))


def _older(announcement: Announcement) -> list[tuple[Version, str]]:
    found: list[tuple[Version, str]] = []
    for url in announcement.sources:
        try:
            version = Version.parse(url.rpartition("/")[2])
        except ValueError:  # a URL that `version_url` did not make
            continue
        if version < announcement.manifest.version:
            found.append((version, url))
    return found


def check_layout(manifest: WeightManifest) -> None:
    """Raises SnapshotError if a manifest is empty, or its tensors or shards are malformed, missing or overlapping."""
    end = 0
    for t in manifest.tensors:
        fits = (
            t.dtype in DTYPES
            and all(n >= 0 for n in t.shape)
            and math.prod(t.shape) * DTYPES[t.dtype].itemsize == t.num_bytes
            and t.offset_bytes == aligned(end)
        )
        if not fits:
            raise SnapshotError(f"version {manifest.version} has a malformed tensor: {t}")
        end = t.offset_bytes + t.num_bytes
    if end == 0:
        raise SnapshotError(f"version {manifest.version} has no data")
    try:
        check_tiling(manifest.tensors, [block for piece in manifest.shards for block in piece.blocks])
        for piece in manifest.shards:
            _check_piece(manifest, piece)
    except ValueError as e:
        raise SnapshotError(f"version {manifest.version}: {e}") from None


def _check_piece(manifest: WeightManifest, piece: ShardEntry) -> None:
    file = piece.file
    if file.name not in HostFiles(piece.host).slots:
        raise ValueError(f"names the file {file.name!r}, not a slot of host {piece.host}")
    if piece.delta is not None and piece.delta.name != delta_of(file.name):
        raise ValueError(f"names the delta {piece.delta.name!r} for {file.name}")
    want = ShardMap(manifest.tensors, piece.blocks).num_bytes
    if file.num_bytes != want:
        raise ValueError(f"{file.name} has {file.num_bytes} bytes, its tensors need {want}")
    if file.num_chunks > MAX_CHUNKS:
        raise ValueError(f"{file.name} has {file.num_chunks} chunks, limit {MAX_CHUNKS}")
    if hash_of_hashes(file.chunk_hashes) != file.blake3:
        raise ValueError(f"{file.name} is corrupt: its digests are not what {file.blake3} is of")


def check_table(manifest: WeightManifest, expected: TensorTable) -> None:
    """Raises SnapshotError if names, dtypes or shapes of a snapshot differ from the expected ones."""
    got = {t.name: (t.dtype, t.shape) for t in manifest.tensors}
    want = {name: (dtype, tuple(shape)) for name, (dtype, shape) in expected.items()}
    wrong = sorted(name for name in got.keys() | want.keys() if got.get(name) != want.get(name))
    if wrong:
        name = wrong[0]
        raise SnapshotError(
            f"version {manifest.version} differs from the model in {len(wrong)} tensors, first {name}: "
            f"expected {want.get(name, 'nothing')}, got {got.get(name, 'nothing')}"
        )


def check_fit(manifest: WeightManifest, *, run: str, tokenizer_hash: str, expected: TensorTable | None) -> None:
    """Checks a manifest against this run and model before any allocation or read.

    Raises SnapshotError if the run, the tokenizer or the `expected` tensors differ, or the manifest is malformed.
    """
    for what, got, want in (
        ("run", manifest.run, run),
        ("tokenizer hash", manifest.tokenizer_hash, tokenizer_hash),
    ):
        if got != want:
            raise SnapshotError(f"version {manifest.version}: expected {what} {want!r}, got {got!r}")
    check_layout(manifest)
    if expected is not None:
        check_table(manifest, expected)


def reserve(segments: Sequence[SharedMemoryFile], num_bytes: int) -> None:
    """Grows each segment to at least `num_bytes`. Raises SnapshotError if the file system has too little free space."""
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


T = TypeVar("T", WeightManifest, Announcement)


def sign(signed: T, token: Token) -> T:
    """Returns the message with the keyed hash of its other fields."""
    return dataclasses.replace(signed, hmac=token.sign(_message(signed)))


def check_signature(signed: WeightManifest | Announcement, token: Token) -> None:
    """Raises SnapshotError if the message is unsigned, or not signed with this token."""
    manifest = signed if isinstance(signed, WeightManifest) else signed.manifest
    what = "manifest" if signed is manifest else "announcement"
    if signed.hmac is None:
        raise SnapshotError(f"version {manifest.version} has an unsigned {what}, and this actor was given a token")
    if not token.has_signed(_message(signed), signed.hmac):
        raise SnapshotError(
            f"the {what} of version {manifest.version} was not signed with this actor's token; "
            f"learner and actors need the same one ({TOKEN_FILE})"
        )


def _message(signed: WeightManifest | Announcement) -> bytes:
    return codec.encode(dataclasses.replace(signed, hmac=None))
