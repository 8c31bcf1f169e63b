import os
import subprocess
import sys

import pytest

from bridge.liveness import VARIABLE, Doing, Pulse, Sign
from tests.integration.support.processes import REPO, wait_until

CHILD = """
import sys
from bridge.liveness import Doing, Pulse
pulse = Pulse.of_this_process()
pulse.work(Doing.WORKING)
pulse.work(Doing.ALONE)
pulse.start()
print("there", flush=True)
sys.stdin.read()
"""


def test_pulse_of_a_child_is_felt_by_its_parent_and_stays_felt_when_it_is_gone():
    fd = Pulse.create()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=REPO,
        env=os.environ | {VARIABLE: str(fd), "PYTHONPATH": str(REPO)},
        pass_fds=(fd,),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pulse = Pulse(fd)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        wait_until(lambda: pulse.feel().num_beats >= 2, "two beats")
        assert (pulse.feel().num_works, pulse.feel().doing) == (2, Doing.ALONE)
    finally:
        child.communicate()
    last = pulse.feel()
    assert pulse.feel() == last and last.num_works == 2


def test_pulse_nobody_feels_beats_and_works_all_the_same(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    pulse = Pulse.of_this_process()
    assert pulse.feel() == Sign(0, 0, Doing.STARTING)
    pulse.start()
    wait_until(lambda: pulse.feel().num_beats == 1, "a beat")
    pulse.stop()
    pulse.work(Doing.WAITING)
    assert (pulse.feel().num_works, pulse.feel().doing) == (1, Doing.WAITING)


def test_pulse_of_this_process_is_not_handed_on_to_its_children(monkeypatch):
    monkeypatch.setenv(VARIABLE, str(Pulse.create()))
    Pulse.of_this_process()
    assert VARIABLE not in os.environ


def test_pulse_over_something_else_is_refused():
    with pytest.raises((OSError, ValueError)):
        Pulse(os.open("/dev/null", os.O_RDONLY))
