"""The processes of a run's trackers, with programs of the test's own in their place."""

import json
import sys

import pytest

from configs.run_folder import set_up_run
from configs.schema import Config
from configs.sections import RunConfig
from launch.services import tracker_service
from launch.services.tracker_service import TrackerProcess, TrackerService
from learner.metrics.trackers import SentSteps
from tests.integration.support.jobs import is_alive
from tests.integration.support.processes import wait_until

LISTENS = "import sys, pathlib; pathlib.Path({started!r}).open('a').write('x'); sys.stdin.read(); {then}"


@pytest.fixture
def run(tmp_path):
    folder = set_up_run(Config(preset="test", run=RunConfig(dir=str(tmp_path / "run"), trackers="tensorboard,wandb")))
    (folder / "trackers").mkdir()
    return folder


@pytest.fixture
def process(run):
    """`process(PROGRAM)`: as the tracker's; `started` grows with each start."""

    def call(program: str) -> TrackerProcess:
        program = program.format(started=str(run / "started"), then="")
        return TrackerProcess("wandb", run, command=[sys.executable, "-c", program])

    return call


def num_starts(run) -> int:
    return len((run / "started").read_text()) if (run / "started").exists() else 0


def test_process_ends_when_the_run_does_and_what_it_has_is_said(run, process, caplog):
    SentSteps(num_sent=7, where="wandb sync there").write(run / "trackers" / "wandb.json")
    one = process(LISTENS)
    wait_until(lambda: num_starts(run) == 1, "its start")
    with caplog.at_level("INFO", logger="absl"):
        one.end()
        one.join(60.0)
    assert "tracker wandb: 7 rows sent; wandb sync there" in caplog.text and num_starts(run) == 1


def test_process_that_dies_is_started_again(run, process, monkeypatch, caplog):
    monkeypatch.setattr(tracker_service, "FIRST_PAUSE_S", 0.01)
    one = process(
        "import sys, pathlib; p = pathlib.Path({started!r}); p.open('a').write('x');"
        "sys.exit(9) if len(p.read_text()) < 3 else sys.stdin.read()"
    )
    wait_until(lambda: num_starts(run) == 3, "its third start")
    one.end()
    one.join(60.0)
    assert caplog.text.count("process exited with code 9") == 2


def test_process_that_hangs_is_killed_and_the_rows_that_are_left_are_said(run, process, caplog):
    SentSteps(num_left=12, problem="ConnectionError: no route").write(run / "trackers" / "wandb.json")
    one = process("import pathlib, threading; pathlib.Path({started!r}).open('a').write('x'); threading.Event().wait()")
    # The child may write its start before the parent has its handle.
    wait_until(lambda: num_starts(run) == 1 and one._process is not None, "its start")
    assert one._process is not None
    pid = one._process.pid
    one.end()
    one.join(0.0)
    assert not is_alive(pid)
    assert "12 rows not sent (ConnectionError: no route)" in caplog.text
    assert f"python -m launch.services.track --run_dir={run} --tracker=wandb" in caplog.text


def test_rows_that_may_be_missing_are_said_and_not_as_sent(run, process, caplog):
    SentSteps(num_sent=12, num_unsure=5, problem="TimeoutError: no answer").write(run / "trackers" / "wandb.json")
    one = process(LISTENS)
    with caplog.at_level("INFO", logger="absl"):
        one.end()
        one.join(60.0)
    assert "5 of 12 rows may be missing in the tracker (TimeoutError: no answer)" in caplog.text
    assert "rows sent" not in caplog.text


def test_run_that_ends_before_a_process_was_started_again_waits_for_none(run, process, monkeypatch):
    monkeypatch.setattr(tracker_service, "FIRST_PAUSE_S", 1e6)
    one = process("import sys, pathlib; pathlib.Path({started!r}).open('a').write('x'); sys.exit(9)")
    wait_until(lambda: num_starts(run) == 1 and one._process is not None and one._process.poll() is not None, "its end")
    one.end()
    one.join(60.0)
    assert num_starts(run) == 1


def test_service_starts_one_for_each_that_the_learner_does_not_write_itself(run, monkeypatch):
    started: list[str] = []

    class Fake:
        def __init__(self, name, folder) -> None:
            started.append(name)

        def end(self) -> None:
            started.append("end")

        def join(self, seconds) -> None:
            started.append("join")

    monkeypatch.setattr(tracker_service, "TrackerProcess", Fake)
    service = TrackerService(Config(preset="test", run=RunConfig(trackers="wandb,tensorboard,mlflow")), run)
    service.close()
    assert started == ["wandb", "mlflow", "end", "end", "join", "join"]


@pytest.mark.heavy
def test_real_process_without_a_record_ends_when_told(run):
    (run / "model_path.txt").write_text("model\n")
    (run / "trackers" / "wandb.json").write_text(json.dumps({"num_sent": 3}))
    one = TrackerProcess("wandb", run)
    one.end()
    one.join(120.0)
    assert one._process is None or one._process.returncode in (0, 2)  # 2: this environment has no wandb
