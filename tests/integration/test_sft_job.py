"""`launch.sft` as a user starts it: a learner of two processes, its summary and report, and what other commands say."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.run_folder import RunFolder
from learner.metrics.metrics_writer import read_rows
from learner.model.architecture import Architecture
from tests.integration.support.processes import python
from tests.learner.chat_folder import make_chat_model

pytestmark = pytest.mark.integration
FIELDS = {
    "run.num_updates": 4,
    "model.max_tokens": 64,
    "prompts.held_out_one_in": 4,
    "sft.rows_per_update": 8,
    "packing.rows": 4,
    "checkpoint.every_n_steps": 2,
    "evaluation.num_problems": 4,
    "evaluation.every_n_steps": 0,
    "optimizer.learning_rate": 3e-3,
}


def start(command: str, config: str, fields: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    given = [f"--config.{k}={v}" for k, v in fields.items()]
    return python("-m", command, f"--config={config}", *given, timeout_s=900)


@pytest.fixture(scope="module")
def rows_and_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    rows = [{"prompt": f"{a} + {b} = ?", "response": str(a + b)} for a in range(8) for b in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_chat_model(folder / "model", seed=1)
    return folder


def numbers(run: Path) -> np.ndarray:
    """Loss and gradient norm of each update, then the held-out losses."""
    rows = read_rows(RunFolder(run).metrics)
    steps = [[r["loss"], r["grad_norm"]] for r in rows if r["kind"] == "step"]
    return np.array([*steps, [r["eval/loss"] for r in rows if r["kind"] == "eval"]])


@pytest.fixture(scope="module")
def alone(rows_and_model: Path) -> tuple[Path, str]:
    """The folder of a whole run of one process, and what it printed."""
    return trained(rows_and_model, "alone")


def trained(folder: Path, name: str, **more: Any) -> tuple[Path, str]:
    run = folder / name
    fields = {"run.dir": run, "model.path": folder / "model", "prompts.path": folder / "rows.jsonl"}
    done = start("launch.sft", "sft:tiny", FIELDS | fields | {k.replace("__", "."): v for k, v in more.items()})
    assert done.returncode == 0, done.stdout + done.stderr
    return run, done.stdout


def test_run_leaves_a_summary_a_report_and_a_model(alone):
    run, printed = alone
    summary = json.loads(RunFolder(run).summary.read_text())
    assert (summary["outcome"], summary["steps"], summary["checkpoint"]) == ("done", 4, 4)
    assert summary["held_out_loss_end"] < summary["held_out_loss_start"] and summary["held_out_reward_end"] is None
    assert "held-out loss" in printed and RunFolder(run).report.stat().st_size > 10_000
    assert Architecture.from_hf(RunFolder(run).model(4)).vocab_size == 128


def test_two_processes_train_as_one(alone, rows_and_model):
    both, _ = trained(rows_and_model, "both", learner__num_processes=2, mesh__fsdp=2)
    np.testing.assert_allclose(numbers(both), numbers(alone[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("command", "config", "said"),
    [
        ("launch.local", "sft:tiny", "start it with python -m launch.sft"),
        ("launch.sft", "tiny", "expected loss.name=sft, as in --config=sft, got grpo_clip"),
    ],
)
def test_command_of_the_other_kind_of_run_refuses_a_config_and_makes_no_folder(tmp_path, command, config, said):
    done = start(command, config, {"run.dir": tmp_path / "run"})
    assert done.returncode == 2 and said in done.stderr
    assert not list(tmp_path.iterdir())
