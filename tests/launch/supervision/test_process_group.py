"""Processes that are one, over members that say what the test says."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from bridge.liveness import Activity
from launch import cli
from launch.supervision.backend import TOGETHER_S, ProcessGroup


@dataclasses.dataclass
class Member:
    role: str
    returncode: int | None = None
    hung: str = ""
    doing: Activity = Activity.WORKING
    num_restarts: int = 0
    num_restarts_in_a_row: int = 0
    calls: list = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.role

    def start(self, more: Sequence[str] = ()) -> None:
        self.returncode, self.hung = None, ""
        self.calls.append(list(more))

    def end_if_hung(self) -> bool:
        self.calls.append("end_if_hung")
        return bool(self.hung)

    def request_stop(self) -> None:
        self.calls.append("request_stop")

    def kill_after(self, is_over: Callable[[], bool]) -> None:
        self.calls.append(("kill_after", is_over))

    def kill(self) -> None:
        self.calls.append("kill")

    def describe(self) -> str:
        return f"is {self.returncode}"

    def last_error(self) -> str:
        return f"what {self.role} said"


class Setup:
    def __init__(self, count: int) -> None:
        self.now_s = 100.0
        self.members = [Member(f"learner-{i}") for i in range(count)]
        meetings = (f"127.0.0.1:{port}" for port in range(7000, 7100))
        self.group = ProcessGroup("learner", self.members, meeting=lambda: next(meetings), clock=lambda: self.now_s)

    def codes(self, *codes: int | None) -> None:
        for member, code in zip(self.members, codes, strict=True):
            member.returncode = code


@pytest.fixture
def three() -> Setup:
    return Setup(3)


def test_each_start_has_a_new_meeting_and_tells_each_who_it_is(three):
    three.group.start(["--x"])
    three.group.start()
    assert [m.calls[0] for m in three.members] == [
        ["--x", "--coordinator=127.0.0.1:7000", "--num_processes=3", f"--process_id={i}"] for i in range(3)
    ]
    assert all(m.calls[1][0] == "--coordinator=127.0.0.1:7001" for m in three.members)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((None, None, None), None),
        ((None, 0, 0), None),  # the others have no more to do, the first one puts things in order
        ((0, None, None), 0),
        ((0, 0, -6), 0),  # the run is done, whatever became of a follower's farewell
        ((-9, -6, -6), -9),
        ((-6, -6, -9), -9),
        ((-6, 1, -6), 1),
        ((-6, -6, 2), 2),
        ((4, -6, 1), 1),
        ((4, -6, 0), 4),
        ((-6, 4, -6), 4),  # its disk failed, and JAX ended the others
        ((3, 3, 3), 3),
    ],
)
def test_code_is_of_the_one_whose_end_says_most(three, codes, code):
    three.codes(*codes)
    assert three.group.returncode == code


def test_others_get_time_to_end_by_themselves_once_one_has_died(three):
    three.group.start()
    three.codes(None, -9, None)
    assert three.group.returncode is None
    three.now_s += TOGETHER_S - 0.1
    assert three.group.returncode is None
    three.now_s += 0.2
    assert three.group.returncode == -9
    three.group.start()
    three.codes(None, -9, None)
    assert three.group.returncode is None  # counted from anew


def test_one_that_hung_is_named_and_its_error_quoted(three):
    three.codes(-6, -9, -6)
    three.members[1].hung = "no heartbeat for 4 s"
    assert three.group.hung == "learner-1: no heartbeat for 4 s"
    assert three.group.last_error() == "learner-1: what learner-1 said"
    assert "learner-1 is -9" in three.group.describe()


def test_all_are_asked_watched_counted_and_killed_together(three):
    three.group.request_stop()
    three.group.kill_after(is_over := lambda: True)
    three.group.end_if_hung()
    three.group.kill()
    assert all(m.calls == ["request_stop", ("kill_after", is_over), "end_if_hung", "kill"] for m in three.members)


def test_restarts_are_of_all_together(three):
    three.group.num_restarts = 2
    three.group.start()
    assert [m.num_restarts for m in three.members] == [2, 2, 2]


def test_doing_is_the_first_ones(three):
    three.members[0].doing, three.members[1].doing = Activity.NO_ACTORS, Activity.WAITING
    assert three.group.doing is Activity.NO_ACTORS


def test_code_of_a_process_that_can_not_start_is_what_the_launcher_knows(three):
    three.codes(cli.USAGE_ERROR, 1, -9)
    assert three.group.returncode == cli.USAGE_ERROR
