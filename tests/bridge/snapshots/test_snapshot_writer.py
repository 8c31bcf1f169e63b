import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import blake3
import numpy as np
import pytest

from bridge import codec
from bridge.snapshots.snapshot_format import HostFiles, SnapshotError, SupersededError, latest
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy, is_verified, map_tensors
from bridge.weight_types import DeltaEntry, WeightManifest
from tests.bridge.factories import with_file, with_piece
from tests.bridge.snapshots.whole import WholeDraft, write_whole
from tests.bridge.snapshots.written import BFLOAT16, KEYS, assert_holds, at, fetch, publish, slot_path, weights


def test_publish_fetch_map_round_trip(writer, folder, local):
    assert latest(folder) is None
    for step in (1, 2, 3):
        manifest = publish(writer, step)
        assert latest(folder) == manifest
        fetch(folder, manifest, local, **KEYS)
        assert is_verified(local) == manifest
        assert_holds(local, manifest, weights(step))
    assert (manifest.version, manifest.run, manifest.created_s) == (at(3), "r", 12.5)


def test_latest_of_a_missing_folder_is_none(folder):
    assert latest(folder) is None


def test_bfloat16_written_in_place_and_mapped_without_a_copy(writer, folder, local):
    values = np.array([[1.0, -2.5, 3.140625], [1e30, 0.0, -0.0]], np.float32)
    with WholeDraft(writer, at(0), [("odd", "float16", (3,)), ("w", "bfloat16", (2, 3))]) as draft:
        draft.buffer("odd")[:] = 1
        buffer = draft.buffer("w")
        assert (buffer.dtype, buffer.shape) == (BFLOAT16, (2, 3))
        np.copyto(buffer, values, casting="unsafe")
        manifest = draft.announce()
    fetch(folder, manifest, local, **KEYS)
    tensors = map_tensors(local, manifest)
    np.testing.assert_array_equal(tensors["w"], values.astype(BFLOAT16))
    for tensor in tensors.values():
        assert not tensor.flags.writeable and not tensor.flags.owndata
        with pytest.raises(ValueError):
            tensor.flags.writeable = True


def test_manifest_offsets_are_aligned_and_hash_covers_the_whole_file(writer, folder):
    manifest = publish(writer, 1)
    offsets = [t.offset_bytes for t in manifest.tensors]
    assert offsets == [0, 64, 512] and manifest.shards[0].file.num_bytes == 516
    data = slot_path(folder, manifest).read_bytes()[: manifest.shards[0].file.num_bytes]
    assert manifest.shards[0].file.chunk_hashes == blake3.blake3(data).digest()  # one chunk: the file is small
    assert manifest.shards[0].file.blake3 == blake3.blake3(blake3.blake3(data).digest()).hexdigest()
    assert data[12:64] == bytes(52)


def test_equal_weights_hash_equal_whatever_the_slot_held_before(writer):
    first = write_whole(writer, at(1), {"a": np.ones(3, np.float32)}, dtype="float32")
    for step in (2, 3):  # another layout, so that the gaps lie over old data
        write_whole(writer, at(step), {"x": np.full(999, step, np.float32)}, dtype="float32")
    with WholeDraft(writer, at(4), [("a", "float32", (3,)), ("b", "float32", (1,))]) as draft:
        draft.buffer("a")[:], draft.buffer("b")[:] = 1, 2
        gapped = draft.announce()
    data = np.zeros(68, np.uint8)
    data[:12], data[64:] = np.ones(3, np.float32).view(np.uint8), np.full(1, 2, np.float32).view(np.uint8)
    assert gapped.shards[0].file.chunk_hashes == blake3.blake3(data.data).digest()
    again = write_whole(writer, at(5), {"a": np.ones(3, np.float32)}, dtype="float32")
    assert again.shards[0].file.blake3 == first.shards[0].file.blake3


def test_slots_alternate_and_are_reused(writer, folder):
    manifests = [publish(writer, step) for step in range(4)]
    assert [m.shards[0].file.name for m in manifests] == ["slot-0", "slot-1", "slot-0", "slot-1"]
    inodes = {p.name: p.stat().st_ino for p in folder.glob("slot-*")}
    publish(writer, 4)
    assert {p.name: p.stat().st_ino for p in folder.glob("slot-*")} == inodes
    assert len(inodes) == 2


@pytest.fixture
def shared_memory_folder():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def num_page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_pages_are_warm_from_the_first_version_on(shared_memory_folder):
    """A cold page costs one page fault, a warm one none, whichever slot is written."""
    num_pages = 4096
    shape = (num_pages * 4096 // 4,)
    source = np.ones(shape, np.float32)
    folder, local = shared_memory_folder / "weights", shared_memory_folder / "local"
    with contextlib.closing(VerifiedCopy(folder, local, **KEYS)) as mirror:
        writer = SnapshotWriter(folder, **KEYS)
        for step in range(4):
            draft = WholeDraft(writer, at(step), [("w", "float32", shape)])
            before = num_page_faults()
            np.copyto(draft.buffer("w"), source)
            manifest = draft.announce()
            assert num_page_faults() - before < num_pages / 10, f"written cold at step {step}"
            before = num_page_faults()
            mirror.fetch(manifest)
            assert step == 0 or num_page_faults() - before < num_pages / 10, f"fetched cold at step {step}"
        writer.remove()


def test_both_slots_are_allocated_before_the_first_version_is_written(writer, folder):
    WholeDraft(writer, at(0), [("w", "float32", (2**20,))])
    for slot in HostFiles().slots[:2]:
        assert (folder / slot).stat().st_blocks * 512 >= 2**22


def test_grown_model_gets_larger_slots_while_the_announced_version_stays(writer, folder, local):
    small = publish(writer, 1)
    with WholeDraft(writer, at(2), [("layer.0", "float32", (5000,))]) as draft:
        draft.buffer("layer.0")[:] = 2
        fetch(folder, small, local, **KEYS)
        assert_holds(local, small, weights(1))
        large = draft.announce()
    fetch(folder, large, local, **KEYS)
    np.testing.assert_array_equal(map_tensors(local, large)["layer.0"], np.full(5000, 2, np.float32))


def test_draft_that_is_not_sealed_changes_nothing(writer, folder, local):
    announced = publish(writer, 1)
    with pytest.raises(RuntimeError, match="stop"), WholeDraft(writer, at(2), [("w", "float32", (100,))]) as draft:
        draft.buffer("w")[:] = 9
        raise RuntimeError("stop")
    assert latest(folder) == announced
    fetch(folder, announced, local, **KEYS)
    assert_holds(local, announced, weights(1))
    with pytest.raises(ValueError, match="aborted"):
        draft.buffer("w")
    publish(writer, 2)


def test_blocks_never_written_cannot_be_sealed(writer, folder):
    draft = WholeDraft(writer, at(1), [("a", "float32", (2,)), ("b", "float32", (2,))])
    draft.buffer("a")[:] = 1
    with pytest.raises(ValueError, match="1 blocks not written, the first of tensor b"):
        draft.announce()
    assert latest(folder) is None
    draft.buffer("b")[:] = 1
    draft.announce()


def test_sealed_memory_cannot_be_written_any_more(writer):
    draft = WholeDraft(writer, at(1), [("a", "float32", (2,))])
    block = draft.draft.block(0)
    block[:] = 1
    draft.announce()
    with pytest.raises(ValueError, match="read-only"):
        block[0] = 2
    with pytest.raises(ValueError, match="sealed"):
        draft.announce()


def test_begin_refuses_versions_that_do_not_advance_and_bad_tables(writer):
    write_whole(writer, at(5, incarnation=1), weights(5), dtype="float32")
    for version in (at(5, incarnation=1), at(4, incarnation=1), at(9, incarnation=0)):
        with pytest.raises(ValueError, match="not newer"):
            WholeDraft(writer, version, [("a", "float32", (1,))])
    next_version = at(6, incarnation=1)
    for entries in ([("a", "int8", (1,))], [("a", "float32", (1,)), ("a", "float32", (1,))], []):
        with pytest.raises(ValueError):
            WholeDraft(writer, next_version, entries)
    WholeDraft(writer, next_version, [("a", "float32", (1,))])
    with pytest.raises(ValueError, match="neither sealed nor aborted"):
        WholeDraft(writer, next_version, [("a", "float32", (1,))])


def test_begin_without_room_says_how_much_is_needed(writer, folder, local):
    announced = publish(writer, 1)
    with pytest.raises(SnapshotError, match=r"needs \d{19,} bytes more .* \d+ are available"):
        WholeDraft(writer, at(2), [("a", "float32", (2**60,))])
    fetch(folder, announced, local, **KEYS)
    publish(writer, 2)


def test_room_is_checked_before_any_of_it_is_taken(writer, folder, monkeypatch):
    real = os.statvfs(folder)
    nearly_full = types.SimpleNamespace(f_bavail=1, f_frsize=real.f_frsize)
    monkeypatch.setattr(os, "statvfs", lambda _: nearly_full)
    with pytest.raises(SnapshotError, match=f"needs {2 * 2**20} bytes more .* {real.f_frsize} are available"):
        WholeDraft(writer, at(1), [("a", "float32", (2**18,))])
    assert [(folder / s).stat().st_blocks for s in HostFiles().slots[:2]] == [0, 0]


def test_second_live_writer_and_other_run_refused(writer, folder):
    with pytest.raises(SnapshotError, match="another live process"):
        SnapshotWriter(folder, **KEYS)
    publish(writer, 1)
    writer.close()
    with pytest.raises(SnapshotError, match="run 'r', this is 'other'"):
        SnapshotWriter(folder, run="other", tokenizer_hash="t")
    SnapshotWriter(folder, **KEYS).close()


def test_remove_deletes_the_folder_but_not_what_was_mirrored(writer, folder, local):
    manifest = publish(writer, 1)
    fetch(folder, manifest, local, **KEYS)
    (folder / ".manifest.1").write_bytes(b"torn")  # of a writer that was killed while it announced
    writer.remove()
    assert not folder.exists() and latest(folder) is None
    assert_holds(local, manifest, weights(1))
    with pytest.raises(SnapshotError, match="gone"):
        fetch(folder, manifest, local, **KEYS)


KILLED_IN_A_WRITE = """
import os, pathlib, signal, sys
from bridge.files import replace_file
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace_file(pathlib.Path(sys.argv[1]), b"torn")
"""


@pytest.mark.parametrize("name", ["manifest", "delta-0", "delta-2"])
def test_remove_deletes_what_a_killed_writer_left_half_written(writer, folder, name):
    publish(writer, 1)
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_A_WRITE, folder / name], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [p for p in folder.iterdir() if p.name.startswith(f".{name}.")]
    writer.remove()
    assert not folder.exists()


def test_remove_of_a_folder_with_something_foreign_in_it_leaves_that_and_says_so(writer, folder, caplog):
    publish(writer, 1)
    (folder / "notes").write_text("mine")
    writer.remove()
    assert [p.name for p in folder.iterdir()] == ["notes"]
    assert "snapshot folder not deleted" in caplog.text and str(folder) in caplog.text


@pytest.mark.parametrize("position", [0, 200, 515])
def test_one_corrupt_byte_is_refused_and_nothing_is_mapped(writer, folder, local, position):
    good = publish(writer, 1)
    fetch(folder, good, local, **KEYS)
    manifest = publish(writer, 2)
    with open(slot_path(folder, manifest), "r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ 1]))
    with pytest.raises(SnapshotError, match="corrupt") as caught:
        fetch(folder, manifest, local, **KEYS)
    assert not isinstance(caught.value, SupersededError)
    assert is_verified(local) is None
    for version in (manifest, good):  # the old copy is overwritten, and says so
        with pytest.raises(SnapshotError, match="no whole version"):
            map_tensors(local, version)


def test_truncated_slot_is_refused_as_corrupt(writer, folder, local):
    manifest = publish(writer, 1)
    os.truncate(slot_path(folder, manifest), 100)
    with pytest.raises(SnapshotError, match="corrupt"):
        fetch(folder, manifest, local, **KEYS)


def test_superseded_version_says_so(writer, folder, local):
    old = publish(writer, 1)
    new = publish(writer, 2)
    with pytest.raises(SupersededError, match="announced is 0:2"):
        fetch(folder, old, local, **KEYS)
    with WholeDraft(writer, at(3), [("w", "float32", (9,))]):  # the old slot is being overwritten
        with pytest.raises(SupersededError):
            fetch(folder, old, local, **KEYS)
        fetch(folder, new, local, **KEYS)
    assert_holds(local, new, weights(2))


def test_mismatch_of_run_tokenizer_or_model_is_refused(writer, folder, local):
    manifest = publish(writer, 1)
    table = {"norm": ("float32", (3,)), "layer.0": ("float32", (100,)), "scalar": ("float32", ())}
    fetch(folder, manifest, local, **KEYS, expected=table)
    wrong_tables = [
        table | {"extra": ("float32", (1,))},
        {k: v for k, v in table.items() if k != "norm"},
        table | {"norm": ("bfloat16", (3,))},
        table | {"norm": ("float32", (1, 3))},
    ]
    for wrong in wrong_tables:
        with pytest.raises(SnapshotError, match="differs from the model in 1 tensors, first (norm|extra)"):
            fetch(folder, manifest, local, **KEYS, expected=wrong)
    with pytest.raises(SnapshotError, match="expected run 'q', got 'r'"):
        fetch(folder, manifest, local, run="q", tokenizer_hash="t")
    with pytest.raises(SnapshotError, match="tokenizer hash 'u', got 't'"):
        fetch(folder, manifest, local, run="r", tokenizer_hash="u")
    assert is_verified(local) == manifest  # refused before anything was overwritten


def forge(manifest: WeightManifest, **tensor_fields) -> WeightManifest:
    first = dataclasses.replace(manifest.tensors[0], **tensor_fields)
    return dataclasses.replace(manifest, tensors=(first, *manifest.tensors[1:]))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: forge(m, shape=(4,)), "malformed tensor"),
        (lambda m: forge(m, dtype="float64"), "malformed tensor"),
        (lambda m: forge(m, offset_bytes=4), "malformed tensor"),
        (lambda m: dataclasses.replace(m, tensors=m.tensors[::2]), "malformed tensor"),
        (lambda m: with_file(m, name="slot-3"), "not a slot"),
        (lambda m: with_file(m, name="slot-0.host-1"), "not a slot of host 0"),
        (lambda m: dataclasses.replace(m, tensors=()), "no data"),
        (lambda m: with_file(m, num_bytes=520), "has 520 bytes, its tensors need 516"),
        (lambda m: with_file(m, chunk_hashes=bytes(32)), "digests are not what"),
        (
            lambda m: with_piece(m, delta=DeltaEntry(base_version=at(0), codec="c", name="delta-1", chunk_ends=(1,))),
            "delta-1",
        ),
        (lambda m: dataclasses.replace(m, shards=()), "no piece has tensor norm"),
    ],
)
def test_forged_manifest_is_refused_before_anything_is_read(writer, folder, local, change, complaint):
    good = publish(writer, 1)
    fetch(folder, good, local, **KEYS)
    forged = change(good)
    (folder / "manifest").write_bytes(codec.encode(forged))
    with pytest.raises(SnapshotError, match=complaint):
        fetch(folder, forged, local, **KEYS)
    with pytest.raises(SnapshotError, match="expected version .*, got 0:1"):
        map_tensors(local, forged)
    assert_holds(local, good, weights(1))


def test_damaged_manifest_is_an_error_not_an_empty_folder(writer, folder):
    publish(writer, 1)
    data = (folder / "manifest").read_bytes()
    (folder / "manifest").write_bytes(data[:-1])
    with pytest.raises(SnapshotError, match="cannot be read"):
        latest(folder)
