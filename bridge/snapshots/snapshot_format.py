"""Folder layout, chunk hashes, manifest checks, signatures, errors.

One bad chunk can be told from the others and taken again, and a download that broke off goes on where it stopped.

manifest            the announced snapshot (a `WeightManifest`), replaced by one rename
slot-0, slot-1      tensor data; the manifest names one, another may be half-written
slot-2              one more, where a version is kept for readers that are slower than versions come
delta-0, ...        what leads to a slot's data from the version before, if the manifest names it
writer              held locked by the one process that publishes here

Those of the learner's process 3 are slot-0.host-3 and so on: hosts of one machine share a folder, and all of them a
bucket.

Data files need none: the manifest holds their hashes. A message says its type, so the signature of one is none of the
other.
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
"""Size of a chunk, unless a file would have more than MAX_CHUNKS: large enough that Python's part costs nothing, small
enough that taking one again doesn't either."""
MAX_CHUNKS = 4096
"""Chunks of one file at most: 128 KiB of digests in a manifest."""


# Copied and hashed while it is still in the second-level cache.
COPY_BLOCK_BYTES = 256 * 2**10


def chunk_bytes_of(num_bytes: int, *, smallest: int = CHUNK_BYTES) -> int:
    """The chunk size of a file: a power-of-two multiple of `smallest`, so that it has MAX_CHUNKS chunks at most."""
    size = smallest
    while num_bytes > size * MAX_CHUNKS:
        size *= 2
    return size


def unhashed(name: str, num_bytes: int, *, smallest: int = CHUNK_BYTES) -> FileEntry:
    """The entry of a file that is yet to be written."""
    chunk_bytes = chunk_bytes_of(num_bytes, smallest=smallest)
    hashes = bytes(blake3.blake3.digest_size * -(-num_bytes // chunk_bytes))
    return FileEntry(name=name, num_bytes=num_bytes, chunk_bytes=chunk_bytes, chunk_hashes=hashes, blake3="")


def hashed(file: FileEntry, data: np.ndarray) -> FileEntry:
    """The same entry with the digests of what the file holds: one pass over `data`, a uint8 vector."""

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
    """What `FileEntry.blake3` is of a file whose chunks have these digests."""
    return blake3.blake3(chunk_hashes).hexdigest()


def is_chunk(chunk: np.ndarray, file: FileEntry, index: int) -> bool:
    """Whether these bytes are that chunk."""
    return blake3.blake3(chunk.data).digest() == file.chunk_hash(index)


MANIFEST = "manifest"


class HostFiles:
    """The names of what one of the learner's processes writes into a snapshot folder."""

    def __init__(self, host: int = 0) -> None:
        of_host = f".host-{host}" if host else ""
        self.spare = f"slot-2{of_host}"
        """Empty until it is needed; not there where no slow readers are waited for."""
        self.slots = (f"slot-0{of_host}", f"slot-1{of_host}", self.spare)
        self.writer = f"writer{of_host}"
        """Locked by the one live writer."""
        self.all = (*(delta_of(slot) for slot in self.slots), *self.slots, self.writer)
        """Every file of this process alone."""


def delta_of(slot: str) -> str:
    """The delta that leads to what a slot holds, and is written under that slot's lock."""
    return slot.replace("slot", "delta", 1)


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
    """A manifest file's contents; None if there is no such file.

    Raises:
      SnapshotError: it is damaged, of another format, or another user's.
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
    """Where it is written which version a reader's copy holds; there only while the copy is whole."""
    return into.with_name(f"{into.name}.manifest")


def part_path(into: pathlib.Path) -> pathlib.Path:
    """Where it is written which version a reader's copy is being filled with; there only while it is not whole."""
    return into.with_name(f"{into.name}.part")


def version_url(base: str, run: str, version: Version) -> str:
    """The URL under which a version's files lie, on the server or in the bucket at `base`."""
    return f"{base.rstrip('/')}/v1/{urllib.parse.quote(run, safe='')}/{version}"


def older_place(announcement: Announcement) -> tuple[Version, str] | None:
    """The older version that an announcement names besides its own, and the URL under which that one lies."""
    return max(_older(announcement), default=None)


def own_sources(announcement: Announcement, piece: int) -> tuple[str, ...]:
    """Where the announced version itself lies, or one of its pieces, by its index: those of its host first."""
    older = {url for _, url in _older(announcement)}
    of_piece = announcement.host_sources[piece] if announcement.host_sources else ()
    return (*of_piece, *(s for s in announcement.sources if s not in older))


def _older(announcement: Announcement) -> list[tuple[Version, str]]:
    found: list[tuple[Version, str]] = []
    for url in announcement.sources:
        try:
            version = Version.parse(url.rpartition("/")[2])
        except ValueError:  # a place that is not named as `place_of` does
            continue
        if version < announcement.manifest.version:
            found.append((version, url))
    return found


def check_layout(manifest: WeightManifest) -> None:
    """Refuses a manifest that would be read outside its tensors, or that contradicts itself.

    Raises:
      SnapshotError: it is empty, a tensor's size is not its shape's or its place not where it belongs, its pieces don't
        make up all of it or overlap, or one of them is malformed.
    """
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
    """Refuses a piece that names a foreign file or one of another size, or whose chunks are too many or not its own."""
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


def reserve(segments: Sequence[SharedMemoryFile], num_bytes: int) -> None:
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


T = TypeVar("T", WeightManifest, Announcement)


def sign(signed: T, token: Token) -> T:
    """The same with the keyed hash of all the rest of it."""
    return dataclasses.replace(signed, hmac=token.sign(_message(signed)))


def check_signature(signed: WeightManifest | Announcement, token: Token) -> None:
    """Refuses what the token has not signed.

    Raises:
      SnapshotError: it is unsigned, or its signature is another's or another message's.
    """
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
