"""Ways to write down how one chunk becomes another, to compare with `bridge.snapshots.delta`."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import zstandard

from bridge.snapshots.delta import apply_chunk, compress_chunk
from bridge.snapshots.snapshot_format import CHUNK_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """Makes a delta of (base, new), and the new one of (delta, base)."""

    name: str
    make: Callable[[np.ndarray, np.ndarray], bytes]
    apply: Callable[[bytes, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a codec takes on one step's chunks, on one core."""

    codec: str
    ratio: float
    make_s: float
    apply_s: float


def codecs() -> list[Codec]:
    """zstd of the plain XOR, zstd of its byte planes, and what is used."""
    plain = [
        Codec(
            name=f"zstd {level}",
            make=lambda base, new, level=level: _zstd(level, base ^ new),
            apply=lambda delta, base: base ^ _unzstd(delta, base.size),
        )
        for level in (-5, -1, 1, 3)
    ]
    planes = [
        Codec(
            name=f"zstd {level}, byte planes",
            make=lambda base, new, level=level: _zstd(level, _columns(base ^ new, 2)),
            apply=lambda delta, base: base ^ _columns(_unzstd(delta, base.size), base.size // 2),
        )
        for level in (-1, 1, 3)
    ]
    used = Codec(name="places and values, zstd 1 (used)", make=_make_used, apply=_apply_used)
    return [*plain, *planes, used]


def compare(base: np.ndarray, new: np.ndarray, *, chunk_bytes: int = CHUNK_BYTES) -> list[Row]:
    """Each codec on the same chunks; seconds of one thread's processor time, for the whole.

    Raises:
      AssertionError: a codec does not give back what it was given.
    """
    pairs = [(base[i : i + chunk_bytes], new[i : i + chunk_bytes]) for i in range(0, base.size, chunk_bytes)]
    rows: list[Row] = []
    for codec in codecs():
        num_bytes, make_s, apply_s = 0, 0.0, 0.0
        for old, young in pairs:
            start = time.thread_time()
            delta = codec.make(old, young)
            made = time.thread_time()
            got = codec.apply(delta, old)
            apply_s += time.thread_time() - made
            make_s += made - start
            num_bytes += len(delta)
            assert np.array_equal(got, young), codec.name
        rows.append(Row(codec=codec.name, ratio=base.size / num_bytes, make_s=make_s, apply_s=apply_s))
    return rows


def _zstd(level: int, data: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data.data)


def _unzstd(delta: bytes, num_bytes: int) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(delta, max_output_size=num_bytes), np.uint8)


def _columns(data: np.ndarray, width: int) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(-1, width).T).reshape(-1)


def _make_used(base: np.ndarray, new: np.ndarray) -> bytes:
    return compress_chunk(base, new, planes=2)


def _apply_used(delta: bytes, base: np.ndarray) -> np.ndarray:
    into = np.empty_like(base)
    apply_chunk(delta, base, into)
    return into
