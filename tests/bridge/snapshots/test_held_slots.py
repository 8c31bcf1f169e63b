import os

import pytest

from bridge.snapshots.held_slots import GoneError, HeldSlots, NoSuchFileError
from bridge.snapshots.writer import SnapshotBusyError
from tests.bridge.snapshots.serving import RUN, Clock, at, open_writer, publish, values


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "w"


@pytest.fixture
def writer(folder):
    made = open_writer(folder)
    yield made
    made.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def slots(folder, clock):
    made = HeldSlots(folder, reader_wait_s=10.0, clock=clock)
    yield made
    made.close()


def never() -> None:
    raise AssertionError("aborted")


def read(slots: HeldSlots, step: int, name: str = "slot-0", *, run: str = RUN) -> bytes:
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
    with writer.begin(at(3), [("w", "float32", (9,))]), pytest.raises(GoneError):
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


def test_close_aborts_and_frees_everything(slots, writer):
    publish(writer, 1)
    aborted = []
    with slots.reading(RUN, at(1), "slot-0", abort=lambda: aborted.append(1)):
        publish(writer, 2)
        slots.close()
        assert aborted == [1]
        publish(writer, 3)
