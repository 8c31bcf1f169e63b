"""Deltas as the writer makes them: which versions have one, and that it leads there."""

import ml_dtypes
import numpy as np
import pytest

from bridge.credentials import Token
from bridge.rollout_types import Version
from bridge.snapshots.delta import apply_chunk, compressed_range
from bridge.snapshots.snapshot_format import check_signature, latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from tests.bridge.snapshots.whole import WholeDraft, write_whole

TOKEN = Token("t" * 40)


def at(step, incarnation=0):
    return Version(incarnation=incarnation, step=step)


def weights(step, size=30_000):
    base = np.random.default_rng(0).normal(0, 0.02, size).astype(np.float32)
    moved = np.random.default_rng(step).normal(0, 1e-5, size).astype(np.float32)
    return {"a": base + moved, "b": np.full(5, step, np.float32)}


def make_writer(folder, **options):
    return SnapshotWriter(folder, run="r", tokenizer_hash="t", chunk_bytes=4096, **options)


def bytes_of(folder, manifest):
    return np.fromfile(folder / manifest.shards[0].file.name, np.uint8, count=manifest.shards[0].file.num_bytes)


def rebuilt(folder, manifest, base):
    """The version's bytes, from its delta and the bytes of the version before."""
    delta = (folder / manifest.shards[0].delta.name).read_bytes()
    assert len(delta) == manifest.shards[0].delta.num_bytes
    into = np.zeros(manifest.shards[0].file.num_bytes, np.uint8)
    for i in range(manifest.shards[0].file.num_chunks):
        (start, end), (first, last) = manifest.shards[0].file.chunk(i), compressed_range(manifest.shards[0].delta, i)
        apply_chunk(delta[first:last], base[start:end], into[start:end])
    return into


def test_each_version_between_full_ones_has_a_delta_that_leads_to_it(tmp_path):
    folder = tmp_path / "snap"
    got = []
    with_base = None
    writer = make_writer(folder, full_every=3)
    for step in range(1, 8):
        manifest = write_whole(writer, at(step), weights(step), dtype="bfloat16")
        data = bytes_of(folder, manifest)
        got.append(manifest.shards[0].delta is not None)
        if manifest.shards[0].delta is not None:
            assert manifest.shards[0].delta.base_version == at(step - 1)
            assert manifest.shards[0].delta.num_bytes < manifest.shards[0].file.num_bytes / 2
            np.testing.assert_array_equal(rebuilt(folder, manifest, with_base), data)
        assert latest(folder) == manifest
        with_base = data
    assert got == [False, True, True, False, True, True, False]


def test_writer_that_is_told_nothing_makes_no_deltas(tmp_path):
    writer = make_writer(tmp_path / "snap")
    for step in (1, 2, 3):
        assert write_whole(writer, at(step), weights(step), dtype="bfloat16").shards[0].delta is None


def test_first_version_of_a_writer_that_took_over_is_full(tmp_path):
    first = make_writer(tmp_path / "snap", full_every=10)
    write_whole(first, at(1), weights(1), dtype="bfloat16")
    first.close()
    second = make_writer(tmp_path / "snap", full_every=10)
    assert write_whole(second, at(1, incarnation=1), weights(2), dtype="bfloat16").shards[0].delta is None
    assert write_whole(second, at(2, incarnation=1), weights(3), dtype="bfloat16").shards[0].delta is not None


def test_delta_after_an_aborted_draft_leads_from_the_announced_version(tmp_path):
    folder = tmp_path / "snap"
    writer = make_writer(folder, full_every=10)
    base = bytes_of(folder, write_whole(writer, at(1), weights(1), dtype="bfloat16"))
    with WholeDraft(writer, at(2), [("a", "bfloat16", (30_000,)), ("b", "bfloat16", (5,))]) as draft:
        draft.buffer("a")[:] = np.float32(3.0).astype(ml_dtypes.bfloat16)
    manifest = write_whole(writer, at(3), weights(3), dtype="bfloat16")
    assert manifest.shards[0].delta is not None and manifest.shards[0].delta.base_version == at(1)
    np.testing.assert_array_equal(rebuilt(folder, manifest, base), bytes_of(folder, manifest))


def test_model_of_another_shape_has_no_delta_and_the_old_file_is_gone(tmp_path):
    folder = tmp_path / "snap"
    writer = make_writer(folder, full_every=10)
    for step in (1, 2, 3):
        write_whole(writer, at(step), weights(step), dtype="bfloat16")
    assert sorted(p.name for p in folder.glob("delta-*")) == ["delta-0", "delta-1"]
    assert write_whole(writer, at(4), weights(4, size=20_000), dtype="bfloat16").shards[0].delta is None
    assert sorted(p.name for p in folder.glob("delta-*")) == ["delta-0"]
    writer.remove()
    assert not folder.exists()


def test_signature_covers_the_delta(tmp_path):
    writer = make_writer(tmp_path / "snap", full_every=10, token=TOKEN)
    write_whole(writer, at(1), weights(1), dtype="bfloat16")
    manifest = write_whole(writer, at(2), weights(2), dtype="bfloat16")
    assert manifest.shards[0].delta is not None
    check_signature(manifest, TOKEN)


def test_no_room_for_a_delta_announces_the_version_without_one(tmp_path, monkeypatch):
    writer = make_writer(tmp_path / "snap", full_every=10)
    write_whole(writer, at(1), weights(1), dtype="bfloat16")
    from bridge import files
    from bridge.snapshots import snapshot_writer as module

    real = files.replace_file

    def full_for_deltas(path, data, **options):
        if path.name.startswith("delta-"):
            raise OSError(28, "No space left on device")
        real(path, data, **options)

    monkeypatch.setattr(module, "replace_file", full_for_deltas)
    manifest = write_whole(writer, at(2), weights(2), dtype="bfloat16")
    assert manifest.shards[0].delta is None and latest(tmp_path / "snap") == manifest
    monkeypatch.undo()
    assert write_whole(writer, at(3), weights(3), dtype="bfloat16").shards[0].delta is not None


@pytest.mark.parametrize("full_every", [2, 5])
def test_equal_weights_have_an_empty_delta(tmp_path, full_every):
    folder = tmp_path / "snap"
    writer = make_writer(folder, full_every=full_every)
    write_whole(writer, at(1), weights(1), dtype="bfloat16")
    manifest = write_whole(writer, at(2), weights(1), dtype="bfloat16")
    assert manifest.shards[0].delta is not None and manifest.shards[0].delta.num_bytes == 0
    assert (folder / manifest.shards[0].delta.name).read_bytes() == b""
