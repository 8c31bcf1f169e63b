"""Python calls: what they pass to the commands, and what becomes of an error."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from bridge.files import replace_file
from configs.run_folder import RunFolder
from launch import api
from tests.integration.support.processes import wait_until


@pytest.fixture
def commands(monkeypatch):
    """Commands that `api` would start: [(module, arguments)], with the config that --config names at that time."""
    started = []

    def run(module, arguments, on_output):
        files = [pathlib.Path(a.removeprefix("--config=")) for a in arguments if a.startswith("--config=")]
        configs = [json.loads(file.read_text()) for file in files]
        started.append((module, arguments, *configs))
        for config in configs:
            if (summary := RunFolder(pathlib.Path(config["run"]["dir"])).summary).exists():
                replace_file(summary, summary.read_bytes())

    monkeypatch.setattr(api, "_run", run)
    return started


def test_load_config_replaces_fields_of_any_depth():
    config = api.load_config("tiny", {"optimizer.learning_rate": 3e-4, "prompts.task_args.max_terms": 4})
    assert config.optimizer.learning_rate == 3e-4
    assert config.prompts.task_args == api.load_config("tiny").prompts.task_args | {"max_terms": 4}


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"optimizer.lr": 1}, "did you mean 'optimizer.learning_rate'"), ({"run.seed": "1"}, "Expected `int`")],
)
def test_load_config_of_a_wrong_field_raises(fields, said):
    with pytest.raises(ValueError, match=said):
        api.load_config("tiny", fields)


def test_error_of_the_callers_function_ends_the_command():
    def stop(line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="Serving HTTP"):
        api._run("http.server", ["--bind=127.0.0.1", "0"], stop)  # which serves until it is ended


def test_train_gives_the_command_the_whole_config_and_returns_its_summary(commands, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    RunFolder(run).summary.write_text(json.dumps({"steps": 7, "held_out": [[0, 0.25], [7, 0.5]]}))
    RunFolder(run).metrics.write_text('{"kind": "step"}\n{"kind": "ev')  # cut off by a kill
    trained = api.train("tiny", {"run.seed": 3}, run_dir=run)
    ((module, _, config),) = commands
    assert module == "launch.local" and config["run"]["seed"] == 3 and config["run"]["dir"] == str(run)
    assert config["preset"] == "tiny"
    assert trained.held_out == [(0, 0.25), (7, 0.5)] and trained.metrics() == [{"kind": "step"}]
    assert trained.model is None
    RunFolder(run).model(7).mkdir()
    assert trained.model == RunFolder(run).model(7)


def test_train_that_wrote_no_summary_raises_though_an_earlier_start_did(monkeypatch, tmp_path):
    monkeypatch.setattr(api, "_run", lambda *_: None)
    RunFolder(tmp_path).summary.write_text("{}")
    with pytest.raises(api.CommandError, match="summary.json"):
        api.train("tiny", run_dir=tmp_path)


def test_train_takes_any_label_of_a_config(commands, tmp_path):
    RunFolder(tmp_path).summary.write_text("{}")
    api.train(dataclasses.replace(api.load_config("tiny"), preset="exp/v2:a"), run_dir=tmp_path)
    assert commands[0][2]["preset"] == "exp/v2:a"


def test_evaluate_gives_flags_and_returns_the_results(commands, tmp_path):
    out = tmp_path / "base.json"
    out.write_text('{"sets": {}}')
    assert api.evaluate(model="m", prompts=["a.jsonl", "task:x"], out=out, k=4, verifier="math") == {"sets": {}}
    ((module, arguments),) = commands
    assert module == "launch.tools.evaluate"
    assert arguments == [
        "--model=m",
        f"--out={out}",
        "--k=4",
        "--verifier=math",
        "--prompts=a.jsonl",
        "--prompts=task:x",
    ]


def test_report_returns_its_file(commands, tmp_path):
    assert api.report(tmp_path / "a") == RunFolder(tmp_path / "a").report
    assert api.report("a", "b", out="both.html").name == "both.html"
    assert commands[1][1] == ["--run_dir=a", "--run_dir=b", "--out=both.html"]


@pytest.mark.heavy
def test_command_that_fails_raises_its_error_line_and_code(capsys):
    printed = []
    with pytest.raises(api.CommandError, match="did you mean 'run.seed'") as failed:
        api._run("launch.tools.check_config", ["--config=tiny", "--config.run.sed=1"], printed.append)
    assert failed.value.code == 2 and len(printed) == 1
    api._run("launch.tools.check_config", ["--config=tiny"], printed.append)


SAVES = """
import signal

def save(*_):
    print("saved", flush=True)
    raise SystemExit(130)

signal.signal(signal.SIGINT, save)
print("trains", flush=True)
while True:
    signal.pause()
"""
CALLS = """
import signal

from launch import api

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background

try:
    api._run("saves", [], lambda line: print(line, flush=True))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_command_that_is_interrupted_is_waited_for(tmp_path):
    (tmp_path / "saves.py").write_text(SAVES)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLS],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with caller:
        assert caller.stdout is not None and caller.stdout.readline() == "trains\n"
        os.killpg(caller.pid, signal.SIGINT)  # as Ctrl-C does
        assert caller.stdout.read() == "saved\ninterrupted\n"


STOPS = """
import signal
import sys

from launch import cli


def stop(*_):
    open("stopped", "w").close()
    sys.exit(3)


def main():
    print("trains", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    cli.run(main)
"""


def test_command_is_stopped_if_its_caller_is_killed(tmp_path):
    (tmp_path / "stops.py").write_text(STOPS)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLS.replace("saves", "stops")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    with caller:
        assert caller.stdout is not None and caller.stdout.readline() == "trains\n"
        caller.kill()
    wait_until((tmp_path / "stopped").exists, "the command was stopped")
