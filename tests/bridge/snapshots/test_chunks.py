import os
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import MAX_CHUNKS, SnapshotError, chunk_bytes_of, hashed, unhashed
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import copy_chunks, map_tensors
from bridge.weight_types import FileEntry
from tests.bridge.snapshots.whole import write_whole
from tests.bridge.snapshots.written import fetch, flat, has_chunk

MIB = 2**20


def entry_of(data: bytes, chunk_bytes: int) -> FileEntry:
    """Written apart from the code under test: plain slices, one after another."""
    digests = [blake3.blake3(data[i : i + chunk_bytes]).digest() for i in range(0, len(data), chunk_bytes)]
    return FileEntry(
        name="slot-0",
        num_bytes=len(data),
        chunk_bytes=chunk_bytes,
        chunk_hashes=b"".join(digests),
        blake3=blake3.blake3(b"".join(digests)).hexdigest(),
    )


@given(st.integers(1, 2**50))
def test_chunk_size_any_file_has_a_bounded_number_of_chunks(num_bytes):
    size = chunk_bytes_of(num_bytes)
    assert size % (4 * MIB) == 0 and -(-num_bytes // size) <= MAX_CHUNKS
    assert size == 4 * MIB or -(-num_bytes // (size // 2)) > MAX_CHUNKS  # no larger than it must be


@given(st.binary(min_size=1, max_size=500), st.integers(1, 64))
def test_hashed_any_data_and_chunk_size_equals_slices_hashed_one_by_one(data, chunk_bytes):
    got = hashed(unhashed("slot-0", len(data), smallest=chunk_bytes), np.frombuffer(data, np.uint8))
    assert got == entry_of(data, chunk_bytes)


@pytest.fixture
def fd(tmp_path):
    opened = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("chunk_bytes", [5000, 300_000, 2**20])
def test_copy_chunks_arrives_whole_and_names_the_chunks_that_changed(fd, chunk_bytes):
    data = np.random.default_rng(0).integers(0, 256, 1_000_003, np.uint8)
    file = entry_of(data.tobytes(), chunk_bytes)
    os.pwrite(fd, data.tobytes(), 0)
    into = np.zeros_like(data)
    assert copy_chunks(fd, file, flat(data.size), into) == []
    np.testing.assert_array_equal(into, data)
    for position in (1_000_002, 500_000):
        os.pwrite(fd, bytes([data[position] ^ 1]), position)
    assert copy_chunks(fd, file, flat(data.size), into) == sorted({500_000 // chunk_bytes, 1_000_002 // chunk_bytes})
    assert not has_chunk(into, file, 500_000 // chunk_bytes)
    assert has_chunk(data, file, 500_000 // chunk_bytes)


def test_copy_chunks_of_a_file_too_short_says_where_it_ends(fd):
    data = bytes(1000)
    os.pwrite(fd, data[:150], 0)
    with pytest.raises(EOFError, match="ends at byte 150, 1000 expected"):
        copy_chunks(fd, entry_of(data, 1000), flat(1000), np.zeros(1000, np.uint8))


def test_corrupt_chunk_of_many_is_named_by_its_number(tmp_path: Path):
    keys: dict[str, Any] = {"run": "r", "tokenizer_hash": "t"}
    with_small_chunks = SnapshotWriter(tmp_path / "weights", **keys, chunk_bytes=64)
    values = np.arange(1000, dtype=np.float32)
    manifest = write_whole(with_small_chunks, Version(incarnation=0, step=1), {"w": values}, dtype="float32")
    assert manifest.shards[0].file == entry_of(values.tobytes(), 64)
    fetch(tmp_path / "weights", manifest, tmp_path / "local", **keys)
    np.testing.assert_array_equal(map_tensors(tmp_path / "local", manifest)["w"], values)
    with open(tmp_path / "weights" / manifest.shards[0].file.name, "r+b") as f:
        f.seek(640)
        f.write(b"\xff")
    with pytest.raises(SnapshotError, match="corrupt: 1 of 63 chunks of slot-0 do not match their hash, first 10"):
        fetch(tmp_path / "weights", manifest, tmp_path / "local", **keys)
