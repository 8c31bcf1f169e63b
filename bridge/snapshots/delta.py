"""Deltas: XOR of two versions' data in the served dtype, compressed chunk by chunk, bit-exact.

A reinforcement learning step changes few of the served bytes, mostly in the low bits: a bfloat16 weight changes only
when the float32 weight crosses a rounding boundary. A chunk therefore stores the positions and XOR values of its
changed words. A chunk with too many changes is stored whole, split into the byte planes of its words, so that the
stable high bytes are adjacent. Both forms are compressed with zstd. An unchanged chunk is empty.

A compressed chunk begins with one byte for its form:

    0: number of changed 16-bit words (4 bytes, little-endian), zstd of the gaps' four byte planes and the values' two
    2, 4: zstd of the XOR's byte planes, for words of that many bytes

A decompressed chunk is accepted only if it has the hash of the full file's chunk, so a wrong base is detected.
"""

import collections

import numpy as np
import zstandard

from bridge.snapshots.shard_map import DTYPES
from bridge.snapshots.shared_memory import each_on_all_cores
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.weight_types import DeltaEntry, WeightManifest

CODEC = "xor-sparse-zstd"
_LEVEL = 1
_SPARSE = 0
_PLANES = (2, 4)
_HEAD_BYTES = 5
_ALIGN_BYTES = 8
_CHANGE_BYTES = 6
_SPARSE_SHARE = 8
"""Sparse form: one word in so many may have changed at most, so that it decompresses into less than a chunk."""
_WORTH_SHARE = 2
"""A delta must not exceed the full file's size divided by this number."""


class DeltaError(SnapshotError):
    """Error for a delta that cannot be applied; the caller should fetch the full file."""


def has_same_layout(base: WeightManifest, new: WeightManifest) -> bool:
    """Returns True if both versions have equal tensors, offsets, shards and chunk sizes."""

    def layout(manifest: WeightManifest) -> tuple[object, ...]:
        pieces = [(p.host, p.blocks, p.file.num_bytes, p.file.chunk_bytes) for p in manifest.shards]
        return manifest.run, manifest.tensors, pieces

    return layout(base) == layout(new)


def make_delta(
    base: WeightManifest, base_data: np.ndarray, new: WeightManifest, new_data: np.ndarray, *, name: str
) -> tuple[DeltaEntry, list[bytes]] | None:
    """Returns the delta between two versions of one shard: its entry and its file's bytes per chunk. Uses all cores.

    `base` and `new` are manifests with this shard only, and `name` is the delta file's. Returns None if the layouts
    differ, or the delta exceeds half of the full file.
    """
    if not has_same_layout(base, new):
        return None
    planes = _word_bytes(new)
    (before,), (after,) = ([piece.file for piece in manifest.shards] for manifest in (base, new))

    def compress(index: int) -> bytes:
        if before.chunk_hash(index) == after.chunk_hash(index):
            return b""
        start, end = after.chunk(index)
        return compress_chunk(base_data[start:end], new_data[start:end], planes=planes)

    compressed = each_on_all_cores(compress, range(after.num_chunks))
    ends = tuple(np.cumsum([len(chunk) for chunk in compressed]).tolist())
    if ends[-1] * _WORTH_SHARE > after.num_bytes:
        return None
    return DeltaEntry(base_version=base.version, codec=CODEC, name=name, chunk_ends=ends), compressed


def check_delta(delta: DeltaEntry, *, full_bytes: int) -> None:
    """Raises DeltaError if a delta has another codec, or is larger than the full file (`full_bytes`)."""
    if delta.codec != CODEC:
        raise DeltaError(f"the delta {delta.name} is in {delta.codec!r}, this build reads {CODEC!r}")
    if delta.num_bytes > full_bytes:
        raise DeltaError(f"the delta {delta.name} has {delta.num_bytes} bytes, the full file {full_bytes}")


def compressed_range(delta: DeltaEntry, index: int) -> tuple[int, int]:
    """Returns the first byte of a compressed chunk in the delta file and the byte after its last."""
    return (delta.chunk_ends[index - 1] if index else 0), delta.chunk_ends[index]


def compress_chunk(base: np.ndarray, new: np.ndarray, *, planes: int) -> bytes:
    """Returns the compressed delta between two chunks of equal size, both uint8 vectors; empty if they are equal.

    If many words changed, it contains the byte planes of words of `planes` bytes.
    """
    xor = np.bitwise_xor(_padded(base).view(np.uint64), _padded(new).view(np.uint64))
    touched = np.flatnonzero(xor)
    if touched.size == 0:
        return b""
    words = xor[touched].view(np.uint16)
    changed = np.flatnonzero(words)
    if changed.size * _SPARSE_SHARE > xor.size * 4:
        return bytes([planes]) + _compress(_split(xor.view(np.uint8), planes))
    positions = touched[changed >> 2] * 4 + (changed & 3)
    gaps = np.diff(positions, prepend=-1).astype("<u4") - np.uint32(1)
    values = words[changed].astype("<u2", copy=False)
    payload = np.concatenate([_split(gaps.view(np.uint8), 4), _split(values.view(np.uint8), 2)])
    return bytes([_SPARSE]) + changed.size.to_bytes(4, "little") + _compress(payload)


def apply_chunk(piece: bytes | memoryview, base: np.ndarray, into: np.ndarray) -> None:
    """Reconstructs a chunk from the older version's. `into` and `base` are disjoint uint8 vectors of equal size.

    The caller must check the hash of the result. Raises DeltaError if the bytes are no compressed chunk of this size.
    """
    if len(piece) == 0:
        np.copyto(into, base)
        return
    if piece[0] in _PLANES:
        size = -(-base.size // _ALIGN_BYTES) * _ALIGN_BYTES
        xor = _joined(_decompress(memoryview(piece)[1:], size), piece[0])
        np.bitwise_xor(base, xor[: base.size], out=into)
        return
    if piece[0] != _SPARSE or len(piece) < _HEAD_BYTES:
        raise DeltaError(f"a compressed chunk of {len(piece)} bytes begins with {piece[0]}, an unknown form")
    num = int.from_bytes(piece[1:_HEAD_BYTES], "little")
    if num * 2 * _SPARSE_SHARE > base.size + _ALIGN_BYTES * 2:
        raise DeltaError(f"a compressed chunk has {num} changes for {base.size} bytes")
    payload = _decompress(memoryview(piece)[_HEAD_BYTES:], num * _CHANGE_BYTES)
    gaps = _joined(payload[: 4 * num], 4).view("<u4")
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    target = into if into.size % 2 == 0 else np.empty(into.size + 1, np.uint8)
    if num and positions[-1] * 2 >= target.size:
        raise DeltaError(f"a compressed chunk changes byte {positions[-1] * 2} of {base.size}")
    np.copyto(target[: base.size], base)
    target.view("<u2")[positions] ^= _joined(payload[4 * num :], 2).view("<u2")
    if target is not into:
        np.copyto(into, target[: into.size])


def _word_bytes(manifest: WeightManifest) -> int:
    """Returns the word size of the dtype with the most bytes."""
    num_bytes = collections.Counter[int]()
    for t in manifest.tensors:
        num_bytes[DTYPES[t.dtype].itemsize] += t.num_bytes
    return num_bytes.most_common(1)[0][0]


def _padded(data: np.ndarray) -> np.ndarray:
    """Returns the bytes, padded with zeros to whole 64-bit words."""
    missing = -data.size % _ALIGN_BYTES
    return np.concatenate([data, np.zeros(missing, np.uint8)]) if missing else data


def _split(data: np.ndarray, planes: int) -> np.ndarray:
    """Returns the first bytes of all words, followed by all second bytes, and so on."""
    return np.ascontiguousarray(data.reshape(-1, planes).T).reshape(-1)


def _joined(data: np.ndarray, planes: int) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(planes, -1).T).reshape(-1)


def _compress(data: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data.data)


def _decompress(data: memoryview, num_bytes: int) -> np.ndarray:
    """Decompresses data to exactly `num_bytes` and never allocates more."""
    try:
        # zstd trusts the frame header, which could request any amount of memory, so check it first.
        promised = zstandard.frame_content_size(data)
        if promised != num_bytes:
            raise DeltaError(f"compressed chunk: expected {num_bytes} bytes, got a header of {promised}")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise DeltaError(f"a compressed chunk is malformed: {e}") from e
    if len(raw) != num_bytes:
        raise DeltaError(f"compressed chunk: expected {num_bytes} bytes, got {len(raw)}")
    return np.frombuffer(raw, np.uint8)
