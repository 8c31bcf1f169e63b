import contextlib
import fcntl
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from bridge.snapshots.snapshot_format import SnapshotBusyError, SnapshotError
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.snapshots.verified_copy import VerifiedCopy, map_tensors
from bridge.weight_types import WeightManifest
from tests.bridge.snapshots.written import KEYS, assert_holds, fetch, publish, slot_path, weights


def test_writer_waits_for_a_live_reader_and_not_for_a_dead_one(writer, folder):
    old = publish(writer, 1)
    publish(writer, 2)
    code = """
import fcntl, sys
f = open(sys.argv[1])
fcntl.flock(f, fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""
    reader = subprocess.Popen(
        [sys.executable, "-c", code, slot_path(folder, old)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "locked\n"
        with pytest.raises(SnapshotBusyError, match="waiting for readers of .*slot-0"):
            publish(writer, 3)
    finally:
        reader.kill()
        reader.communicate()
    assert publish(writer, 3).shards[0].file.name == "slot-0"


def test_reader_in_the_middle_of_a_copy_keeps_the_writer_out(writer, folder, local, monkeypatch):
    """Two versions are announced while a reader copies: it gets its version whole or the writer waits."""
    old = publish(writer, 1)
    busy = []
    real = os.preadv

    def preadv_while_publishing(*args):
        publish(writer, 2)
        try:
            publish(writer, 3)
        except SnapshotBusyError as e:
            busy.append(e)
        monkeypatch.setattr(os, "preadv", real)
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv_while_publishing)
    fetch(folder, old, local, **KEYS)
    assert len(busy) == 1
    assert_holds(local, old, weights(1))


def lock(folder: Path, manifest: WeightManifest) -> int:
    fd = os.open(slot_path(folder, manifest), os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


@pytest.fixture
def writer_with_spare(folder, monkeypatch):
    monkeypatch.setattr("bridge.snapshots.snapshot_writer._SPARE_AFTER_S", 0.0)
    made = SnapshotWriter(folder, **KEYS, lock_timeout_s=0.05, has_spare=True)
    yield made
    made.close()


def test_spare_slot_is_taken_while_another_is_read_and_only_then(writer_with_spare, folder, local):
    writer = writer_with_spare
    assert [publish(writer, step).shards[0].file.name for step in (1, 2, 3)] == ["slot-0", "slot-1", "slot-0"]
    assert (folder / "slot-2").stat().st_blocks == 0
    read = publish(writer, 4)
    kept, fd = slot_path(folder, read).read_bytes(), lock(folder, read)
    assert [publish(writer, step).shards[0].file.name for step in (5, 6, 7, 8)] == [
        "slot-0",
        "slot-2",
        "slot-0",
        "slot-2",
    ]
    assert slot_path(folder, read).read_bytes() == kept
    second = lock(folder, publish(writer, 9))
    publish(writer, 10)
    with pytest.raises(SnapshotBusyError):  # two are read and one is announced
        publish(writer, 11)
    os.close(fd)
    os.close(second)
    last = publish(writer, 11)
    fetch(folder, last, local, **KEYS)
    assert_holds(local, last, weights(11))
    writer.remove()
    assert not folder.exists()


def test_spare_slot_that_has_no_room_is_done_without(writer_with_spare, folder, monkeypatch):
    read = publish(writer_with_spare, 1)
    publish(writer_with_spare, 2)
    fd = lock(folder, read)
    monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_bavail=0, f_frsize=4096))
    with pytest.raises(SnapshotBusyError, match="waiting for readers of .*slot-0"):
        publish(writer_with_spare, 3)
    os.close(fd)
    assert publish(writer_with_spare, 3).shards[0].file.name == "slot-0"


def test_spare_slot_is_taken_when_its_room_comes_only_during_the_wait(folder, monkeypatch, caplog):
    monkeypatch.setattr("bridge.snapshots.snapshot_writer._SPARE_AFTER_S", 0.0)
    monkeypatch.setattr("bridge.snapshots.snapshot_writer._SPARE_AGAIN_S", 0.0)
    writer = SnapshotWriter(folder, **KEYS, lock_timeout_s=10.0, has_spare=True)
    read = publish(writer, 1)
    publish(writer, 2)
    fd = lock(folder, read)
    looked, real = [], os.statvfs

    def statvfs_with_room_at_last(path):
        looked.append(path)
        return real(path) if len(looked) >= 5 else types.SimpleNamespace(f_bavail=0, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs_with_room_at_last)
    assert publish(writer, 3).shards[0].file.name == "slot-2"
    assert len(looked) == 5 and caplog.text.count("no third slot") == 1
    os.close(fd)
    writer.close()


def test_announced_slot_locked_by_a_stranger_is_busy_not_superseded(writer, folder, local):
    manifest = publish(writer, 1)
    with open(slot_path(folder, manifest), "r+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(SnapshotBusyError, match="not its writer"):
            fetch(folder, manifest, local, **KEYS)


def test_mapped_tensors_hold_off_the_next_fetch_until_dropped(writer, folder, local):
    first = publish(writer, 1)
    with contextlib.closing(VerifiedCopy(folder, local, **KEYS, lock_timeout_s=0.05)) as mirror:
        mirror.fetch(first)
        tensors = map_tensors(local, first)
        norm = tensors["norm"]
        second = publish(writer, 2)
        del tensors
        with pytest.raises(SnapshotBusyError, match="drop the tensors"):
            mirror.fetch(second)
        np.testing.assert_array_equal(norm, weights(1)["norm"])
        del norm
        mirror.fetch(second)
        assert_holds(local, second, weights(2))


def test_map_while_a_fetch_writes_or_before_any_is_refused(writer, folder, local):
    manifest = publish(writer, 1)
    with pytest.raises(SnapshotError, match="does not exist"):
        map_tensors(local, manifest)
    fetch(folder, manifest, local, **KEYS)
    with open(local, "r+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(SnapshotBusyError, match="being written"):
            map_tensors(local, manifest)
