import os
import types

import pytest

from bridge.snapshots.remote.slot_locks import GoneError, NoSuchFileError, SlotLocks
from bridge.snapshots.snapshot_format import SnapshotBusyError, SnapshotError
from tests.bridge.snapshots.served import RUN, Clock, at, open_writer, publish, values
from tests.bridge.snapshots.whole import WholeDraft


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def slots(folder, clock):
    made = SlotLocks(folder, reader_grace_s=10.0, clock=clock)
    yield made
    made.close()


def never() -> None:
    raise AssertionError("aborted")


def read(slots: SlotLocks, step: int, name: str = "slot-0", *, run: str = RUN) -> bytes:
    with slots.reading(run, at(step), name, abort=never) as file:
        return os.pread(file.fd, file.num_bytes, 0)


def test_reading_the_announced_version_gives_its_bytes(slots, writer):
    publish(writer, 1)
    assert read(slots, 1) == values(1).tobytes()


@pytest.mark.parametrize(
    "name", ["slot-1", "manifest", "writer", "../w/slot-0", "/etc/passwd", "slot-0/", "", ".", "delta-0", "slot-0\0"]
)
def test_file_that_the_manifest_does_not_name_is_not_there(slots, writer, name):
    publish(writer, 1)
    with pytest.raises(NoSuchFileError):
        read(slots, 1, name)
    with pytest.raises(NoSuchFileError):
        read(slots, 1, name)  # also once the version is held


def test_version_of_another_run_or_of_the_future_is_not_there_and_an_old_one_gone(slots, writer, folder):
    with pytest.raises(NoSuchFileError):
        read(slots, 1)  # nothing is announced yet
    publish(writer, 1)
    publish(writer, 2)
    with pytest.raises(NoSuchFileError):
        read(slots, 3)
    with pytest.raises(NoSuchFileError):
        read(slots, 2, "slot-1", run="another")
    with pytest.raises(GoneError):
        read(slots, 1)
    assert read(slots, 2, "slot-1") == values(2).tobytes()
    with pytest.raises(NoSuchFileError):
        read(slots, 2, "slot-1", run="another")


def test_superseded_version_is_served_on_and_its_slot_not_overwritten_while_it_is_read(slots, writer, clock):
    publish(writer, 1)
    with slots.reading(RUN, at(1), "slot-0", abort=never) as file:
        publish(writer, 2)
        slots.sweep()
        with pytest.raises(SnapshotBusyError):
            publish(writer, 3)
        clock.now_s += 9.0
        slots.sweep()
        assert read(slots, 1) == values(1).tobytes()  # another range of a reader that has begun
        assert os.pread(file.fd, file.num_bytes, 0) == values(1).tobytes()
    slots.sweep()
    with pytest.raises(SnapshotBusyError):
        publish(writer, 3)  # the reader may be between two ranges
    clock.now_s += 1.0
    slots.sweep()
    publish(writer, 3)
    with pytest.raises(GoneError):
        read(slots, 1)


def test_reader_that_takes_too_long_is_aborted_and_the_writer_goes_on(slots, writer, clock):
    publish(writer, 1)
    aborted = []
    with slots.reading(RUN, at(1), "slot-0", abort=lambda: aborted.append(1)) as file:
        clock.now_s += 1000.0
        slots.sweep()
        assert not aborted  # nothing newer is announced: nobody waits
        publish(writer, 2)
        slots.sweep()
        clock.now_s += 10.0
        slots.sweep()
        assert aborted == [1]
        publish(writer, 3)
        with pytest.raises(GoneError):
            read(slots, 1)
        os.fstat(file.fd)  # open until its reader has noticed
    with pytest.raises(OSError):
        os.fstat(file.fd)


def test_slot_that_a_writer_already_overwrites_is_gone(slots, writer):
    """The manifest was read just before: version 1 is announced as far as this server knows."""
    old = publish(writer, 1)
    publish(writer, 2)
    slots._latest = lambda: old
    with WholeDraft(writer, at(3), [("w", "float32", (9,))]), pytest.raises(GoneError):
        read(slots, 1)


def test_idle_version_is_let_go_and_taken_again(slots, writer, clock):
    publish(writer, 1)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert read(slots, 1) == values(1).tobytes()
        assert len(os.listdir("/proc/self/fd")) == num_open + 1
        clock.now_s += 1.0
        slots.sweep()
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_slot_shorter_than_announced_is_refused_and_not_held(slots, writer, folder):
    publish(writer, 1)
    os.truncate(folder / "slot-0", 1000)
    with pytest.raises(SnapshotError, match="announced 80000 bytes"):
        read(slots, 1)
    assert not slots._held


def test_close_aborts_and_frees_everything(slots, writer):
    publish(writer, 1)
    aborted = []
    with slots.reading(RUN, at(1), "slot-0", abort=lambda: aborted.append(1)):
        publish(writer, 2)
        slots.close()
        assert aborted == [1]
        publish(writer, 3)


@pytest.fixture
def patient(tmp_path, clock, monkeypatch):
    """(slots that keep one version for slow readers for 100 s, their writer)"""
    monkeypatch.setattr("bridge.snapshots.snapshot_writer._SPARE_AFTER_S", 0.0)
    writer = open_writer(tmp_path / "p", has_spare=True)
    made = SlotLocks(tmp_path / "p", reader_grace_s=10.0, slow_reader_grace_s=100.0, clock=clock)
    yield made, writer
    made.close()
    writer.close()


def passes(slots: SlotLocks, clock: Clock, seconds: float) -> None:
    slots.sweep()
    clock.now_s += seconds
    slots.sweep()


def test_slow_reader_keeps_its_version_however_many_come_and_the_writer_does_not_wait(patient, clock):
    slots, writer = patient
    publish(writer, 1)
    with slots.reading(RUN, at(1), "slot-0", abort=never) as file:
        for step in range(2, 9):
            publish(writer, step)
            passes(slots, clock, 12.0)
            assert os.pread(file.fd, file.num_bytes, 0) == values(1).tobytes()
    passes(slots, clock, 9.0)
    assert read(slots, 1) == values(1).tobytes()  # its connection broke, and it went on
    passes(slots, clock, 10.0)
    with pytest.raises(GoneError):
        read(slots, 1)
    assert {publish(writer, step).shards[0].file.name for step in (9, 10, 11)} >= {"slot-0"}


def test_one_version_is_kept_at_a_time_and_when_its_readers_are_done_the_next(patient, clock):
    slots, writer = patient
    publish(writer, 1)
    cut = []
    with slots.reading(RUN, at(1), "slot-0", abort=never):
        publish(writer, 2)
        passes(slots, clock, 10.0)
        with slots.reading(RUN, at(2), "slot-1", abort=lambda: cut.append(2)):
            publish(writer, 3)
            passes(slots, clock, 10.0)
            assert cut == [2]
        publish(writer, 4)
        reading = slots.reading(RUN, at(4), "slot-1", abort=never)
        file = reading.__enter__()
        publish(writer, 5)
        passes(slots, clock, 9.0)
    passes(slots, clock, 10.0)  # the first is done, and the second late by now
    for step in range(6, 10):
        publish(writer, step)
        passes(slots, clock, 12.0)
    assert os.pread(file.fd, file.num_bytes, 0) == values(4).tobytes()
    reading.__exit__(None, None, None)


def test_version_is_kept_no_longer_than_its_bound_nor_without_room_for_a_third_slot(patient, clock, monkeypatch):
    slots, writer = patient
    publish(writer, 1)
    cut = []
    with slots.reading(RUN, at(1), "slot-0", abort=lambda: cut.append(1)):
        publish(writer, 2)
        passes(slots, clock, 109.0)
        assert not cut
        passes(slots, clock, 1.0)
        assert cut == [1]
    publish(writer, 3)
    assert not (slots._folder / "slot-2").stat().st_blocks
    with slots.reading(RUN, at(3), "slot-0", abort=lambda: cut.append(3)):
        publish(writer, 4)
        passes(slots, clock, 10.0)
        assert cut == [1]
        monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_bavail=0, f_frsize=4096))
        slots.sweep()
        assert cut == [1, 3]
        publish(writer, 5)
