"""The probe, called as a cluster calls it: a new process each time, or with a clock of the test's."""

import json
import os
import signal
import subprocess

import pytest

from bridge.liveness import FILE_VARIABLE, Activity, Liveness
from launch.supervision.hang_detector import HangDetector, HangDetectorState, HangTimeouts
from tests.integration.support.processes import piped, python, wait_until

BOUNDS = [
    "--first_heartbeat_timeout_s=60",
    "--heartbeat_timeout_s=0.3",
    "--start_timeout_s=60",
    "--progress_timeout_s=60",
]


def probe(pulse, *arguments) -> subprocess.CompletedProcess[str]:
    return python("-m", "launch.supervision.kubernetes_probe", f"--liveness_file={pulse}", *arguments)


@pytest.fixture
def process(tmp_path):
    """A process with a pulse at `tmp_path / "pulse"`, which works and then waits for the test."""
    code = (
        "import sys; from bridge.liveness import Activity, Liveness\n"
        "pulse = Liveness.of_this_process(); pulse.start()\n"
        "for line in sys.stdin: pulse.report(Activity[line.strip()]); print('done', flush=True)"
    )
    started = piped(code, env={FILE_VARIABLE: str(tmp_path / "pulse")})
    try:
        wait_until((tmp_path / "pulse").exists, "the pulse")
        yield started
    finally:
        started.kill()
        started.communicate()


def say(process, doing: str) -> None:
    process.stdin.write(f"{doing}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@pytest.mark.heavy
def test_probe_of_a_live_process_is_0_and_of_a_stopped_one_3(process, tmp_path):
    assert probe(tmp_path / "pulse", *BOUNDS).returncode == 0
    os.kill(process.pid, signal.SIGSTOP)
    probe(tmp_path / "pulse", *BOUNDS)  # sees the last beat
    found = []
    wait_until(lambda: found.append(probe(tmp_path / "pulse", *BOUNDS)) or found[-1].returncode == 3, "found")
    assert found[-1].stderr.strip() == "hung: no heartbeat for 0.3 s"


def test_probe_ready_is_0_once_the_process_has_started(process, tmp_path):
    assert probe(tmp_path / "pulse", "--ready").returncode == 3
    say(process, "WAITING")
    assert probe(tmp_path / "pulse", "--ready").returncode == 0


def test_probe_before_the_process_has_a_pulse_is_0_until_its_bound(tmp_path):
    assert probe(tmp_path / "pulse", *BOUNDS).returncode == 0
    memory = json.loads((tmp_path / "pulse.seen").read_text())
    (tmp_path / "pulse.seen").write_text(json.dumps(memory | {"watched_s": 61.0}))
    done = probe(tmp_path / "pulse", *BOUNDS)
    assert done.returncode == 3 and done.stderr.strip() == "hung: no first heartbeat for 60 s"


def test_probe_of_a_process_in_the_place_of_one_that_hung_starts_anew(process, tmp_path):
    seen = {"looked_at_s": 1.0, "watched_s": 1e6, "num_beats": 9999, "num_works": 0, "beat_at_s": 0.0, "work_at_s": 0.0}
    (tmp_path / "pulse.seen").write_text(json.dumps(seen))
    assert probe(tmp_path / "pulse", *BOUNDS).returncode == 0


@pytest.mark.parametrize("left", ["", "[]", "{}", '{"looked_at_s": "x"}', '{"looked_at_s": NaN}'])
def test_probe_whose_memory_is_broken_starts_anew(left, process, tmp_path):
    (tmp_path / "pulse.seen").write_text(left)
    assert probe(tmp_path / "pulse", *BOUNDS).returncode == 0


def test_probe_without_a_pulse_or_with_more_is_refused():
    assert probe("x", "more").returncode not in (0, 3)
    done = python("-m", "launch.supervision.kubernetes_probe")
    assert done.returncode not in (0, 3) and "--liveness_file" in done.stderr


def test_pulse_file_of_a_process_that_is_gone_says_nothing(process, tmp_path):
    say(process, "WORKING")
    assert Liveness.read_file(str(tmp_path / "pulse")).activity is Activity.WORKING
    process.kill()
    process.wait()
    assert Liveness.read_file(str(tmp_path / "pulse")).num_beats == 0
    assert (tmp_path / "pulse").exists()


def test_pulse_file_that_is_none_says_nothing(tmp_path):
    (tmp_path / "pulse").write_bytes(b"short")
    assert Liveness.read_file(str(tmp_path / "pulse")).num_beats == 0
    assert Liveness.read_file(str(tmp_path / "none")).num_beats == 0


def test_pulse_file_is_not_inherited_by_what_the_process_starts(monkeypatch, tmp_path):
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "pulse"))
    Liveness.of_this_process()
    assert FILE_VARIABLE not in os.environ


def test_vigil_that_goes_on_from_its_memory_finds_what_one_vigil_finds():
    bounds = HangTimeouts(
        first_heartbeat_timeout_s=120.0, heartbeat_timeout_s=30.0, start_timeout_s=1800.0, progress_timeout_s=600.0
    )
    now_s = 0.0

    def clock() -> float:
        return now_s

    whole, memory = HangDetector(bounds, clock, max_look_s=60.0), None
    for step in range(80):
        now_s += 20.0
        doing = Activity.WORKING
        # It works for a while, then only beats, then does neither.
        sign = type(Liveness.read_file("/none"))(min(step, 60), min(step, 20), doing)
        parted = HangDetector(bounds, clock, max_look_s=60.0, memory=memory)
        found = parted.look(sign)
        if memory is not None or step == 0:
            assert found == whole.look(sign)
        memory = parted.memory
        assert isinstance(memory, HangDetectorState)
    assert found is not None


def test_vigil_whose_looks_were_far_apart_counts_no_more_than_its_bound():
    bounds = HangTimeouts(
        first_heartbeat_timeout_s=120.0, heartbeat_timeout_s=30.0, start_timeout_s=1800.0, progress_timeout_s=600.0
    )
    now_s = 0.0
    vigil = HangDetector(bounds, lambda: now_s, max_look_s=20.0)
    sign = type(Liveness.read_file("/none"))(5, 5, Activity.WORKING)
    vigil.look(sign)
    now_s = 1e6  # whoever asks was away
    assert vigil.look(sign) is None
