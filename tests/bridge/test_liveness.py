import os
import subprocess
import sys

import pytest

from bridge.liveness import FD_VARIABLE, Activity, Liveness, LivenessSample
from tests.integration.support.processes import REPO, wait_until

CHILD = """
import sys
from bridge.liveness import Activity, Liveness
pulse = Liveness.of_this_process()
pulse.report(Activity.WORKING)
pulse.report(Activity.NO_ACTORS)
pulse.start()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.heavy
def test_pulse_of_a_child_is_felt_by_its_parent_and_stays_felt_when_it_is_gone():
    fd = Liveness.create()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=REPO,
        env=os.environ | {FD_VARIABLE: str(fd), "PYTHONPATH": str(REPO)},
        pass_fds=(fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pulse = Liveness(fd)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        wait_until(lambda: pulse.read().num_beats >= 2, "two beats")
        assert (pulse.read().num_works, pulse.read().activity) == (2, Activity.NO_ACTORS)
    finally:
        child.communicate()
    last = pulse.read()
    assert pulse.read() == last and last.num_works == 2


def test_pulse_nobody_feels_beats_and_works_all_the_same(monkeypatch):
    monkeypatch.delenv(FD_VARIABLE, raising=False)
    pulse = Liveness.of_this_process()
    assert pulse.read() == LivenessSample(0, 0, Activity.STARTING)
    pulse.start()
    wait_until(lambda: pulse.read().num_beats == 1, "a beat")
    pulse.stop()
    pulse.report(Activity.WAITING)
    assert (pulse.read().num_works, pulse.read().activity) == (1, Activity.WAITING)


def test_pulse_of_this_process_is_not_handed_on_to_its_children(monkeypatch):
    monkeypatch.setenv(FD_VARIABLE, str(Liveness.create()))
    Liveness.of_this_process()
    assert FD_VARIABLE not in os.environ


def test_pulse_over_something_else_is_refused():
    with pytest.raises((OSError, ValueError)):
        Liveness(os.open("/dev/null", os.O_RDONLY))
