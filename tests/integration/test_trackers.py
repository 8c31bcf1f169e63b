"""Each tracker's local mode, with its real library, in an environment of their own.

The environment has what the extras of pyproject.toml ask for, and beside it all that this one has (torch, too). It is
kept in .cache/trackers for the next time.
"""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import sysconfig
import tomllib

import pytest

from configs import overrides
from configs.run_folder import run_id, set_up_run
from launch import cli
from learner.metrics.metric_names import FAMILIES, METRICS
from learner.metrics.metrics_writer import MetricsWriter
from learner.metrics.tracker_kinds import KINDS
from learner.metrics.trackers import SentSteps
from tests.integration.support.processes import REPO, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WANTED = sorted(line for kind in KINDS.values() for line in EXTRAS[kind.extra])
NAMES = sorted(KINDS)
WRITTEN_S = 1_750_000_000
"""Long before it is sent."""


@pytest.fixture(scope="module")
def python() -> pathlib.Path:
    """That of an environment with the trackers."""
    venv = REPO / ".cache" / "trackers"
    stamp, python = venv / "stamp", venv / "bin" / "python"
    if stamp.is_file() and json.loads(stamp.read_text()) == [WANTED, sys.version]:
        return python
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    try:
        subprocess.run([python, "-m", "pip", "install", "-q", *WANTED], check=True, capture_output=True)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"the trackers can't be installed here: {e.stderr.decode().splitlines()[-1:]}")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = pathlib.Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout[:-1])
    (theirs / "zz_sluice.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # after their own
    stamp.write_text(json.dumps([WANTED, sys.version]))
    return python


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    config = overrides.apply(
        overrides.load_preset("tiny"),
        {"run.dir": str(tmp_path / "run"), "run.seed": "7", "run.project": "sums", "run.trackers": ",".join(NAMES)},
    )
    folder = set_up_run(config)
    (folder / "model_path.txt").write_text("model\n")
    return folder


def write(run: pathlib.Path, steps, *, restored_step: int, value: float) -> None:
    """What a learner writes that goes on from a step: every metric there is, and an evaluation of an earlier step."""
    writer = MetricsWriter(run, restored_step=restored_step, incarnation=0, clock=lambda: WRITTEN_S + value)
    for step in steps:
        writer.write(
            "step", step, dict.fromkeys(METRICS, value) | {"rewards/my.judges:style": value, "mfu": float("nan")}
        )
    writer.write("eval", steps[-1] - 1, {"eval/rewards/math": value}, problems=3)
    writer.close()


def environment(tmp_path: pathlib.Path, **more: str) -> dict[str, str]:
    """Nobody's keys, nobody's servers, nobody's home."""
    away = ("WANDB_", "MLFLOW_", "TRACKIO_", "HF_", "HOME", "NETRC")
    return {k: v for k, v in os.environ.items() if not k.startswith(away)} | {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(REPO),
        **more,
    }


def track(python, run: pathlib.Path, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-P", "-m", "launch.services.track", f"--run_dir={run}", f"--tracker={name}"],
        env=environment(run.parent, **more),
        cwd=run.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def read(python, run: pathlib.Path, name: str) -> dict:
    done = subprocess.run(
        [python, REPO / "tests/integration/support/tracker_reader.py", name, run / "trackers" / name, "sums", "tiny"],
        env=environment(run.parent),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_restarted_run_is_one_run_with_each_step_once_and_every_metric_by_its_name(python, run, name):
    write(run, [1, 2, 3], restored_step=0, value=0.25)
    assert track(python, run, name).returncode == 0
    write(run, [2, 3, 4], restored_step=1, value=0.5)
    done = track(python, run, name)
    assert done.returncode == 0, done.stderr
    got = read(python, run, name)
    # Of steps that were made again the tracker has the first values.
    assert got["scalars"]["loss"] == [[1, 0.25], [2, 0.25], [3, 0.25], [4, 0.5]]
    if name != "trackio":  # which takes no time
        assert got["times"] == [[step, WRITTEN_S + v] for step, v in got["scalars"]["loss"]]
    assert got["scalars"]["eval/rewards/math"] == [[2, 0.25], [3, 0.5]]
    assert set(got["scalars"]) == {*METRICS, "rewards/my.judges:style", "eval/rewards/math"} - {"mfu"}
    assert (got["seed"], got["about"], got["torch"]) == (7, METRICS | FAMILIES, False)
    id_ = run_id(run)
    assert got["runs"] == ([f"tiny-{id_}"] if name == "trackio" else [["sums", id_, "tiny"]])
    assert {p.name for p in run.parent.iterdir() if not p.name.startswith(".")} <= {"run"}  # nothing elsewhere


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://127.0.0.1:{port}"}),
        ("wandb", {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:{port}"}),
    ],
)
def test_server_that_never_answers_neither_holds_the_run_up_nor_costs_it_a_row(python, run, name, server):
    write(run, [1, 2, 3], restored_step=0, value=0.25)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        more = {k: v.format(port=silent.getsockname()[1]) for k, v in server.items()}
        follower = subprocess.Popen(
            [python, "-P", "-m", "launch.services.track", f"--run_dir={run}", f"--tracker={name}", "--follow"],
            env=environment(run.parent, **more),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert follower.stdin is not None
        wait_until(lambda: (run / "trackers" / f"{name}.lock").exists(), "the tracker's process")
        _, said = follower.communicate(timeout=120)  # its input ends: the run has
    assert follower.returncode == cli.BUSY and b"4 rows are not sent" in said
    assert SentSteps.read(run / "trackers" / f"{name}.json").num_left == 4
    done = track(python, run, name)  # later, into its local mode
    assert done.returncode == 0 and read(python, run, name)["scalars"]["loss"] == [[1, 0.25], [2, 0.25], [3, 0.25]]


def test_without_a_server_by_hand_it_is_one_line_and_exit_code_four(python, run):
    write(run, [1], restored_step=0, value=0.25)
    done = track(python, run, "mlflow", MLFLOW_TRACKING_URI="http://127.0.0.1:1")
    assert done.returncode == cli.BUSY
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("error: ")]
    assert "mlflow takes no metrics" in line
