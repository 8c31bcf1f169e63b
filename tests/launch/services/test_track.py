"""`python -m launch.services.track` as it is typed, without any tracker's library."""

import json
import pathlib

import pytest

from configs.run_folder import set_up_run
from configs.schema import Config
from configs.sections import RunConfig
from launch.services import track
from learner.metrics.tracker_kinds import KINDS, TrackerKind
from learner.metrics.trackers import SentSteps
from tests.launch.commands import call


class Failing:
    """A tracker that takes rows, and fails at its end."""

    where, is_sure_when_closed = "there", False

    def send(self, rows) -> None:
        pass

    def close(self) -> None:
        raise TimeoutError("no answer")


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    folder = set_up_run(Config(preset="test", run=RunConfig(dir=str(tmp_path / "run"))))
    (folder / "model_path.txt").write_text("model\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 1, "loss": 0.5}) + "\n")
    return folder


@pytest.mark.parametrize("arguments", [["--run_dir=/a", "--run_dir=/b"], ["--run_dir=/a,/b"]])
def test_two_runs_are_refused_as_what_they_are(arguments, capsys):
    assert call(track.main, "--tracker=wandb", *arguments) == 2
    assert capsys.readouterr().err == "error: --run_dir: expected one folder, got 2: /a, /b\n"


def test_tracker_that_fails_at_its_end_is_one_line_and_no_rows_are_called_sent(run, capsys, monkeypatch):
    monkeypatch.setitem(KINDS, "wandb", TrackerKind(lambda told: Failing(), (), "wandb"))
    monkeypatch.setattr("launch.cli.log_to_stderr", lambda: None)
    assert call(track.main, "--tracker=wandb", f"--run_dir={run}") == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        "error: wandb failed to close: TimeoutError: no answer; 1 rows of this start may be missing; "
        "the rows are not sent again\n"
    )
    assert SentSteps.read(run / "trackers" / "wandb.json").num_unsure == 1
