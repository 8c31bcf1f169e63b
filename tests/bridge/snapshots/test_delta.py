import dataclasses

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import Version
from bridge.snapshots.delta import (
    CODEC,
    DeltaError,
    apply_chunk,
    check_delta,
    compress_chunk,
    compressed_range,
    has_same_layout,
    make_delta,
)
from bridge.snapshots.snapshot_format import hashed, unhashed
from bridge.weight_types import DeltaEntry, TensorEntry, WeightManifest
from tests.bridge.factories import one_piece
from tests.bridge.snapshots.written import has_chunk


def manifest_of(data, step, *, dtype="bfloat16", chunk_bytes=4096):
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    tensor = TensorEntry(
        name="w",
        dtype=dtype,
        shape=(data.size // itemsize,),
        offset_bytes=0,
        num_bytes=data.size // itemsize * itemsize,
    )
    return WeightManifest(
        run="run",
        version=Version(incarnation=0, step=step),
        tensors=(tensor,),
        shards=one_piece((tensor,), hashed(unhashed("slot-0", data.size, smallest=chunk_bytes), data)),
        tokenizer_hash="t",
    )


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def with_changes(base, share, seed=1):
    """Some of its bytes are others."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(base.size) < share, rng.integers(0, 256, base.size, np.uint8), base)


def applied(piece, base):
    into = random_bytes(base.size, seed=9)
    apply_chunk(piece, base, into)
    return into


@given(
    size=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 1.0]),
    planes=st.sampled_from([2, 4]),
    seed=st.integers(0, 2**16),
)
def test_chunk_compressed_and_applied_is_the_newer_one(size, share, planes, seed):
    base = random_bytes(size, seed)
    new = with_changes(base, share, seed + 1)
    piece = compress_chunk(base, new, planes=planes)
    np.testing.assert_array_equal(applied(piece, base), new)
    assert (piece == b"") == np.array_equal(base, new)


@pytest.mark.parametrize("place", [0, 1, 2, 7, 8, 4094, 4095])
def test_chunk_with_one_changed_byte_is_a_few_bytes_wherever_it_is(place):
    base = random_bytes(4096)
    new = base.copy()
    new[place] ^= 0x40
    piece = compress_chunk(base, new, planes=2)
    np.testing.assert_array_equal(applied(piece, base), new)
    assert len(piece) < 40


def test_delta_of_a_file_leads_to_every_chunk_and_leaves_unchanged_ones_empty():
    base = random_bytes(10 * 4096 + 100)
    new = base.copy()
    new[5000:5010] += 1  # in chunk 1
    new[-1] += 1  # in the last one, which is short
    old, young = manifest_of(base, 1), manifest_of(new, 2)
    made = make_delta(old, base, young, new, name="delta")
    assert made is not None
    entry, pieces = made
    assert entry.base_version == old.version and entry.name == "delta"
    assert [i for i, piece in enumerate(pieces) if piece] == [1, 10]
    data = b"".join(pieces)
    assert entry.num_bytes == len(data)
    into = np.zeros_like(new)
    for i in range(young.shards[0].file.num_chunks):
        (start, end), (first, last) = young.shards[0].file.chunk(i), compressed_range(entry, i)
        apply_chunk(data[first:last], base[start:end], into[start:end])
        assert has_chunk(into, young.shards[0].file, i)
    np.testing.assert_array_equal(into, new)


def test_chunks_with_equal_hashes_are_not_even_compared():
    data = random_bytes(3 * 4096)
    manifest = manifest_of(data, 1)
    # Other bytes than the manifests say: they are never looked at.
    made = make_delta(manifest, data, manifest, with_changes(data, 0.5), name="delta")
    assert made is not None and made[0].chunk_ends == (0, 0, 0)


def test_delta_from_another_base_is_seen_by_the_hash_of_the_full_chunk():
    base, other = random_bytes(4096), random_bytes(4096, seed=5)
    new = with_changes(base, 0.01)
    young = manifest_of(new, 2)
    into = np.zeros_like(new)
    apply_chunk(compress_chunk(base, new, planes=2), other, into)
    assert not has_chunk(into, young.shards[0].file, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_delta_that_is_hardly_smaller_than_the_file_is_not_made(dtype):
    base = random_bytes(4 * 4096)
    new = random_bytes(4 * 4096, seed=1)
    got = make_delta(manifest_of(base, 1, dtype=dtype), base, manifest_of(new, 2, dtype=dtype), new, name="delta")
    assert got is None


def test_delta_between_other_layouts_is_not_made():
    data = random_bytes(4 * 4096)
    other_dtype = manifest_of(data, 2, dtype="float32")
    other_chunks = manifest_of(data, 2, chunk_bytes=8192)
    for young in (other_dtype, other_chunks):
        assert not has_same_layout(manifest_of(data, 1), young)
        assert make_delta(manifest_of(data, 1), data, young, data, name="delta") is None


def test_float32_low_bytes_that_all_changed_cost_no_more_than_themselves():
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 50_000).astype(np.float32)
    base = weights.view(np.uint8)
    new = (weights.view(np.uint32) ^ rng.integers(0, 256, weights.size, np.uint32)).view(np.uint8)
    piece = compress_chunk(base, new, planes=4)
    np.testing.assert_array_equal(applied(piece, base), new)
    assert len(piece) < base.size * 0.27  # one byte of four


BASE = random_bytes(4096)
SPARSE = compress_chunk(BASE, with_changes(BASE, 0.01), planes=2)
DENSE = compress_chunk(BASE, with_changes(BASE, 0.5), planes=2)


def bomb(size):
    return zstandard.ZstdCompressor().compress(bytes(size))


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (b"\x07abc", "an unknown form"),
        (b"\x00\x01", "an unknown form"),
        (SPARSE[:-1], "malformed"),
        (SPARSE + b"x", "malformed"),
        (DENSE[:-1], "malformed"),
        (b"\x02" + bomb(4097), "expected 4096 bytes, got a header of 4097"),
        (b"\x02" + bomb(2**30), "got a header of"),
        (b"\x00" + (2**31).to_bytes(4, "little") + bomb(2**20), "changes for 4096 bytes"),
        (b"\x00" + (2).to_bytes(4, "little") + bomb(13), "expected 12 bytes, got a header of 13"),
        (b"\x00" + (1).to_bytes(4, "little") + zstandard.ZstdCompressor().compress(b"\xff" * 6), "changes byte"),
        (b"\x02" + b"not zstd at all", "malformed"),
    ],
    ids=range(11),
)
def test_malformed_piece_is_refused_before_anything_large_is_allocated(piece, message):
    with pytest.raises(DeltaError, match=message):
        applied(piece, BASE)


@given(start=st.sampled_from([SPARSE, DENSE]), place=st.integers(0, 10**6), bits=st.integers(1, 255))
def test_piece_with_a_flipped_bit_is_refused_or_gives_bytes_that_the_hash_refuses_or_the_right_ones(start, place, bits):
    broken = bytearray(start)
    broken[place % len(broken)] ^= bits
    try:
        got = applied(bytes(broken), BASE)
    except DeltaError:
        return
    assert got.size == BASE.size


def test_delta_of_a_foreign_codec_or_larger_than_the_full_file_is_refused():
    entry = DeltaEntry(base_version=Version(incarnation=0, step=1), codec=CODEC, name="delta-0", chunk_ends=(1, 9))
    check_delta(entry, full_bytes=9)
    with pytest.raises(DeltaError, match="'lzma', this build reads 'xor-sparse-zstd'"):
        check_delta(dataclasses.replace(entry, codec="lzma"), full_bytes=9)
    with pytest.raises(DeltaError, match="has 9 bytes, the full file 8"):
        check_delta(entry, full_bytes=8)
