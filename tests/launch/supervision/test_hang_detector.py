"""A vigil with a clock of the test's: looks ten times a second, as the supervisor does."""

import pytest

from bridge.liveness import Activity, LivenessSample
from launch.supervision.hang_detector import HangDetector, HangTimeouts, SigstopWatchdog

BOUNDS = HangTimeouts(
    first_heartbeat_timeout_s=120.0, heartbeat_timeout_s=30.0, start_timeout_s=1800.0, progress_timeout_s=600.0
)
LOOK_S = 0.1


class Watched:
    """A process whose beats and parts of work come at given periods, under a vigil."""

    def __init__(self, *, beats: bool = True, works: bool = True, doing: Activity = Activity.WORKING) -> None:
        self.now_s = 1000.0
        self.beats, self.works, self.doing = beats, works, doing
        self.num_beats = self.num_works = 0
        self.vigil = HangDetector(BOUNDS, lambda: self.now_s)

    def pass_time(self, seconds: float) -> tuple[float, str] | None:
        """When, from here on, and by what it is found; None if it is not."""
        start_timeout_s = self.now_s
        while self.now_s < start_timeout_s + seconds:
            self.now_s += LOOK_S
            self.num_beats += self.beats
            self.num_works += self.works
            found = self.vigil.look(LivenessSample(self.num_beats, self.num_works, self.doing))
            if found is not None:
                return self.now_s - start_timeout_s, found
        return None


def test_vigil_process_that_beats_and_works_is_never_found():
    assert Watched().pass_time(5000) is None


@pytest.mark.parametrize("doing", list(Activity))
def test_vigil_process_that_beats_no_more_is_found_after_the_bound_whatever_it_did(doing):
    one = Watched(doing=doing)
    assert one.pass_time(50) is None
    one.beats = one.works = False
    found = one.pass_time(100)
    assert found is not None
    assert found[0] == pytest.approx(30.0, abs=2 * LOOK_S) and found[1] == "no heartbeat for 30 s"


def test_vigil_process_that_has_not_beaten_yet_has_a_bound_of_its_own():
    found = Watched(beats=False, works=False, doing=Activity.STARTING).pass_time(500)
    assert found is not None
    assert found[0] == pytest.approx(120.0, abs=2 * LOOK_S) and found[1] == "no first heartbeat for 120 s"


@pytest.mark.parametrize(
    ("doing", "bound_s", "said"),
    [(Activity.WORKING, 600.0, "no progress for"), (Activity.STARTING, 1800.0, "no progress during startup for")],
)
def test_vigil_process_that_beats_and_gets_nothing_done_is_found_later_while_it_starts(doing, bound_s, said):
    one = Watched(doing=doing)
    one.pass_time(50)
    one.works = False
    found = one.pass_time(5000)
    assert found is not None
    assert found[0] == pytest.approx(bound_s, abs=2 * LOOK_S) and said in found[1]


def test_vigil_beats_that_come_just_in_time_start_the_bound_anew():
    one = Watched()
    for _ in range(5):
        one.beats = False
        assert one.pass_time(29) is None
        one.beats = True
        assert one.pass_time(0.05) is None


@pytest.mark.parametrize("gap_s", [60.0, 3600.0, 1e7, -1e6])
def test_vigil_a_watcher_that_was_stopped_and_a_clock_that_was_set_are_no_hang(gap_s):
    one = Watched()
    one.pass_time(10)
    one.now_s += gap_s  # nobody looked, and perhaps nothing ran: a suspended machine, a stopped supervisor
    one.beats = False
    assert one.pass_time(25) is None  # the process, continued with the watcher, takes its time to beat again
    one.beats = True
    assert one.pass_time(100) is None
    one.beats = False
    found = one.pass_time(100)
    assert found is not None and found[0] == pytest.approx(30.0, abs=2 * LOOK_S)


def test_stopped_processes_are_found_once_each_was_stopped_for_the_bound_without_a_break():
    now_s = 0.0
    stopped = SigstopWatchdog(30.0, lambda: now_s)
    found_at: dict[int, float] = {}
    for step in range(1000):
        now_s = step * LOOK_S
        # 7 is stopped from the start; 8 from 10 s on, but is continued for a moment at 35 s.
        seen = {7} | ({8} if now_s >= 10 and not 35 <= now_s < 36 else set())
        for pid in stopped.look(seen):
            found_at.setdefault(pid, now_s)
    assert found_at == {7: pytest.approx(30.0, abs=0.3), 8: pytest.approx(66.0, abs=0.3)}


def test_stopped_processes_time_in_which_the_watcher_was_stopped_too_does_not_count():
    now_s = 0.0
    stopped = SigstopWatchdog(30.0, lambda: now_s)
    stopped.look({7})
    now_s = 100.0
    assert stopped.look({7}) == set()
