"""What the bench of a real model makes of its runs, and when it tells one to end."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import psutil
import pytest

from configs import overrides
from tests.bench.real_model import watched
from tests.bench.real_model.runs import CASES, OVERRIDES, RECIPE


def step(number: int, seconds: float) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "time/step_s": seconds,
        "time/train_s": seconds / 2,
        "sequences": 32.0,
        "tokens": 160.0,
        "real_tokens": 1600.0,
        "lag/mean": 1.0,
        "ess": 0.9,
        "actor/pause_s": 0.5,
    }


def probe(number: int, worst: float) -> dict[str, Any]:
    return {"kind": "probe", "step": number, "parity/max_abs_dlogprob": worst}


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_the_recipe_with_a_probe_of_every_publish(case):
    config = overrides.apply(
        overrides.load_preset(f"{RECIPE}:{case.preset}"), {k: str(v) for k, v in OVERRIDES.items()}
    )
    assert config.preset == case.preset and config.publish.probe_every_n_publishes == 1


JOB = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
(folder,) = [pathlib.Path(a.partition("=")[2]) for a in sys.argv if a.startswith("--config.run.dir=")]
folder.mkdir()
signal.sigwait({signal.SIGINT})
(folder / "told").write_text("")
sys.exit(130)
"""


@pytest.fixture
def job(tmp_path, monkeypatch) -> pathlib.Path:
    """A job that trains for a minute between two looks at it, until it is told to end."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").write_text("")
    (tmp_path / "launch" / "local.py").write_text(JOB)
    folder = tmp_path / "run"

    def trained(*_: Any) -> None:
        if folder.is_dir():  # the job takes signals from here on
            with open(folder / "metrics.jsonl", "a+") as rows:
                rows.seek(0)
                number = 1 + len(rows.readlines())
                rows.write(json.dumps({"kind": "step", "step": number, "time/step_s": 60.0}) + "\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(watched, "_LOOK_S", 0.01)
    monkeypatch.setattr(watched, "look_at_memory", trained)
    monkeypatch.setattr(watched, "asked_for", lambda config, overrides: {"config": config})
    return folder


def test_job_is_told_to_end_after_its_minutes_and_taken_from_its_folder_then(job):
    rows, seen = watched.run_for("a.py", {}, job, bound_s=120.0)
    assert (job / "told").exists() and len(rows) >= 3
    assert watched.run_for("a.py", {}, job, bound_s=120.0) == (rows, seen)
    again, _ = watched.run_for("a.py", {}, job, bound_s=600.0)
    assert len(again) > 10


def test_memory_is_the_kernels_peak_of_the_roles_processes(tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").write_text("")
    hold = "x = bytearray(300 * 2**20)\nx[::4096] = bytes(len(x[::4096]))\ndel x\nprint('held', flush=True)\ninput()\n"
    (tmp_path / "launch" / "learner.py").write_text(hold)
    parent = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'launch.learner'])"
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        peaks: dict[tuple[str, int], int] = {}
        watched.look_at_memory(psutil.Process(process.pid), peaks)
        process.communicate("\n")
    ((role, _), size) = next(iter(peaks.items()))
    assert len(peaks) == 1 and role == "learner" and 300 * 2**20 < size < 400 * 2**20
