"""Deltas: the XOR of two versions' data in the served dtype, compressed chunk by chunk; exact to the bit.

A step of reinforcement learning changes few of the served bytes (a bfloat16 weight moves only when the float32 one
crosses a rounding boundary), and most of those in the last bits. So a chunk is kept as the places that changed and what
they are XORed with. One with too many of them is kept whole, split into its words' bytes, so that the quiet high bytes
lie together. Either way zstd has the last word, and a chunk that didn't change is nothing at all.

A compressed chunk is one byte that says how, and then

    0: how many 16-bit words changed (4 bytes, little-endian), zstd of their gaps' four byte planes and values' two
    2, 4: zstd of the XOR's byte planes, the words having that many bytes

What comes out is believed only once its hash is that of the full file's chunk: so a wrong base can't pass.
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
"""One word in so many may have changed at most, so that decompressing takes less than a chunk."""
_WORTH_SHARE = 2
"""A delta larger than the full file over this isn't made."""


class DeltaError(SnapshotError):
    """A delta that can't be applied: take the full file."""


def has_same_layout(base: WeightManifest, new: WeightManifest) -> bool:
    """Whether both versions have the same tensors at the same places, in like pieces and chunks of the same size."""

    def layout(manifest: WeightManifest) -> tuple[object, ...]:
        pieces = [(p.host, p.blocks, p.file.num_bytes, p.file.chunk_bytes) for p in manifest.shards]
        return manifest.run, manifest.tensors, pieces

    return layout(base) == layout(new)


def make_delta(
    base: WeightManifest, base_data: np.ndarray, new: WeightManifest, new_data: np.ndarray, *, name: str
) -> tuple[DeltaEntry, list[bytes]] | None:
    """What leads from one version's piece to another's: its entry, and the file's bytes chunk by chunk; on all cores.

    None where there is no short way: another layout, or more than half of the full file.

    Args:
      base: the older version's manifest, of this piece alone.
      base_data: the piece's bytes.
      new: the newer one's, of this piece alone.
      new_data: the piece's bytes.
      name: the file that will hold the delta.
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
    """Refuses, before anything of it is read, a delta that this build can't apply.

    Args:
      delta: what a manifest says of it.
      full_bytes: size of the full file.

    Raises:
      DeltaError: another codec, or no shorter than the full file.
    """
    if delta.codec != CODEC:
        raise DeltaError(f"the delta {delta.name} is in {delta.codec!r}, this build reads {CODEC!r}")
    if delta.num_bytes > full_bytes:
        raise DeltaError(f"the delta {delta.name} has {delta.num_bytes} bytes, the full file {full_bytes}")


def compressed_range(delta: DeltaEntry, index: int) -> tuple[int, int]:
    """Where a compressed chunk begins and ends in the delta's file, in bytes."""
    return (delta.chunk_ends[index - 1] if index else 0), delta.chunk_ends[index]


def compress_chunk(base: np.ndarray, new: np.ndarray, *, planes: int) -> bytes:
    """What leads from one chunk to another of the same size, both uint8 vectors; empty if they are equal.

    Where many words changed, it holds the byte planes of words of `planes` bytes.
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
    """Makes a chunk from the older version's; `into` and `base` are uint8 vectors of one size and don't overlap.

    Its hash is still to be compared.

    Raises:
      DeltaError: the bytes are no compressed chunk of this size.
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
        raise DeltaError(f"a compressed chunk of {len(piece)} bytes begins with {piece[0]}, which is no known form")
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
    """Size of the words that most of the data consists of."""
    num_bytes = collections.Counter[int]()
    for t in manifest.tensors:
        num_bytes[DTYPES[t.dtype].itemsize] += t.num_bytes
    return num_bytes.most_common(1)[0][0]


def _padded(data: np.ndarray) -> np.ndarray:
    """The same bytes, with zeros after them up to whole 64-bit words."""
    missing = -data.size % _ALIGN_BYTES
    return np.concatenate([data, np.zeros(missing, np.uint8)]) if missing else data


def _split(data: np.ndarray, planes: int) -> np.ndarray:
    """All words' first bytes, then all second ones and so on."""
    return np.ascontiguousarray(data.reshape(-1, planes).T).reshape(-1)


def _joined(data: np.ndarray, planes: int) -> np.ndarray:
    """What `_split` was given."""
    return np.ascontiguousarray(data.reshape(planes, -1).T).reshape(-1)


def _compress(data: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data.data)


def _decompress(data: memoryview, num_bytes: int) -> np.ndarray:
    """Decompresses what must give exactly so many bytes; nothing larger is ever allocated."""
    try:
        # zstd believes a frame's header: it is compared before, or it could ask for any amount of memory.
        promised = zstandard.frame_content_size(data)
        if promised != num_bytes:
            raise DeltaError(f"a compressed chunk promises {promised} bytes, wanted {num_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise DeltaError(f"a compressed chunk is malformed: {e}") from e
    if len(raw) != num_bytes:
        raise DeltaError(f"a compressed chunk has {len(raw)} bytes, wanted {num_bytes}")
    return np.frombuffer(raw, np.uint8)
