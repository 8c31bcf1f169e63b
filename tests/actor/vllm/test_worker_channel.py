"""The way past vLLM's steps: every worker is asked, every answer is the question's."""

import pathlib
import socket
import struct
import threading

import pytest

from actor.vllm.worker_channel import WorkerChannel, WorkerChannelLostError, listen


@pytest.fixture
def control():
    control = WorkerChannel()
    yield control
    control.close()


def test_all_workers_are_asked_and_what_they_raise_is_their_answer(control):
    asked = []

    def accepts(_: int, path: str, manifest: bytes) -> None:
        asked.append((path, manifest))

    def refuses(_: int, path: str, manifest: bytes) -> None:
        raise ValueError(f"{path} holds {len(manifest)} bytes")

    for handle in (accepts, refuses):
        listen(control.address, handle)
    control.connect(2)
    manifest = bytes(range(256)) * 9000  # more than a socket takes at once
    assert sorted(control.ask("/there", manifest, timeout_s=30)) == ["", "/there holds 2304000 bytes"]
    assert asked == [("/there", manifest)]
    assert not pathlib.Path(control.address).parent.exists()


def test_answer_that_is_late_is_not_taken_for_the_next_one(control):
    goes_on = threading.Event()

    def slow_once(_: int, path: str, manifest: bytes) -> None:
        if path == "first":
            goes_on.wait()
            raise ValueError("the first is refused")

    listen(control.address, slow_once)
    control.connect(1)
    with pytest.raises(TimeoutError):
        control.ask("first", b"", timeout_s=0)
    goes_on.set()
    assert control.ask("second", b"", timeout_s=30) == [""]


def test_request_that_was_cut_while_it_was_sent_is_finished_before_the_next(control):
    goes_on, found = threading.Event(), []

    def slow_once(_: int, path: str, manifest: bytes) -> None:
        if path == "first":
            goes_on.wait()
        found.append((path, len(manifest)))

    listen(control.address, slow_once)
    control.connect(1)
    more = 2**24  # than a socket holds
    for path, size in (("first", 10), ("second", more), ("never", 10)):
        with pytest.raises(TimeoutError):
            control.ask(path, bytes(size), timeout_s=0)
    goes_on.set()
    assert control.ask("third", b"y", timeout_s=30) == [""]
    assert found == [("first", 10), ("second", more), ("third", 1)]


def test_answer_that_was_cut_while_it_was_read_is_finished_before_the_next(control):
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(control.address)
        control.connect(1)
        first, third = (struct.pack(">QI", number, len(said)) + said for number, said in ((1, b"late"), (3, b"now")))
        for there in (first[:5], first[5:14]):
            worker.sendall(there)
            with pytest.raises(TimeoutError):
                control.ask("there", b"", timeout_s=0)
        worker.sendall(first[14:] + third)
        assert control.ask("there", b"", timeout_s=0) == ["now"]


def test_worker_that_has_ended_is_said(control):
    worker = listen(control.address, lambda *_: None)
    control.connect(1)
    worker.shutdown(2)
    with pytest.raises(WorkerChannelLostError, match="a worker exited"):
        control.ask("there", b"", timeout_s=30)


def test_closing_ends_who_waits_for_an_answer(control):
    waits, goes_on = threading.Event(), threading.Event()

    def never(_: int, path: str, manifest: bytes) -> None:
        waits.set()
        goes_on.wait()

    listen(control.address, never)
    control.connect(1)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            control.ask("there", b"", timeout_s=300)
        except WorkerChannelLostError as e:
            found.append(e)

    thread = threading.Thread(target=ask)
    thread.start()
    assert waits.wait(30)
    control.close()
    thread.join(30)
    goes_on.set()
    assert len(found) == 1
