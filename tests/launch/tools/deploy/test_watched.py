"""`watched.sh` over real processes that beat by `bridge.liveness`, judged by the real probe."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.integration.support.processes import REPO, wait_until

WATCHED = REPO / "launch/tools/deploy/watched.sh"
BOUNDS = ["--first_heartbeat_timeout_s=30", "--heartbeat_timeout_s=1", "--start_timeout_s=30", "--progress_timeout_s=1"]
HEALTHY = "pulse.start(); [(pulse.report(Activity.WORKING), time.sleep(0.05)) for _ in range(30)]; sys.exit(7)"
STUCK = "pulse.start(); pulse.report(Activity.WORKING); time.sleep(100)"
STOPPED = "pulse.start(); pulse.report(Activity.WORKING); os.kill(os.getpid(), signal.SIGSTOP)"
HEAD = (
    "import os, signal, sys, time; from bridge.liveness import Activity, Liveness; pulse = Liveness.of_this_process(); "
)


def watch(does: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", str(WATCHED), *options, *BOUNDS, "--", sys.executable, "-c", HEAD + does],
        env=os.environ | {"PYTHONPATH": str(REPO), "SLUICE_PROBE_EVERY_S": "0.1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def left_behind() -> list[pathlib.Path]:
    return list(pathlib.Path("/dev/shm").glob(f"sluice-{os.getuid()}-??????"))


@pytest.mark.heavy
def test_watched_process_that_beats_and_works_ends_with_its_own_code():
    before = left_behind()
    assert watch(HEALTHY).returncode == 7
    wait_until(lambda: set(left_behind()) <= set(before), "nothing is left, once watchers beside this one have ended")


@pytest.mark.heavy
@pytest.mark.parametrize(("does", "says"), [(STUCK, "no progress for"), (STOPPED, "no heartbeat for 1 s")])
def test_watched_process_that_hangs_is_killed_with_a_word(does, says):
    done = watch(does)
    assert done.returncode == 137
    assert says in done.stderr and "process hung, killed" in done.stderr


@pytest.mark.parametrize(("code", "gives"), [(0, 0), (2, 252), (3, 0), (1, 1)])
def test_watched_codes_are_what_they_are_given_for(code, gives):
    assert watch(f"sys.exit({code})", "--codes=3:0,2:252,5:255").returncode == gives


@pytest.mark.parametrize("code", [0, 1, 3])
def test_watched_process_that_ended_with_the_noted_code_leaves_the_file(code, tmp_path):
    assert watch(f"sys.exit({code})", "--codes=3:0", f"--note=3:{tmp_path}/a file").returncode == code % 3
    assert (tmp_path / "a file").exists() == (code == 3)
