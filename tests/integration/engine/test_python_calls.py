"""A sweep and the Python calls on one run: trained by the sweep, continued, evaluated and reported by `launch.api`."""

import json
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from launch import api
from tests.integration.support import jobs
from tests.integration.support.processes import python

pytestmark = [pytest.mark.integration, pytest.mark.engine]
POINTS = ("2e-4", "4e-4")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, model: Path):
    """The folder of a sweep over two step sizes, and what the command printed."""
    folder = tmp_path_factory.mktemp("sweep")
    fields = jobs.SMALL | {"model.path": model, "run.num_updates": 4}
    done = python(
        *("-m", "launch.tools.sweep", "--config=tiny", f"--sweep_dir={folder}"),
        *(f"--config.{name}={value}" for name, value in fields.items()),
        f"--grid=optimizer.learning_rate={','.join(POINTS)}",
        timeout_s=600,
        env={"COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_sweep_trains_one_run_per_point_and_tables_them(swept):
    folder, printed = swept
    rows = json.loads((folder / "sweep.json").read_text())
    assert [row["fields"]["optimizer.learning_rate"] for row in rows] == list(POINTS)
    assert [(row["outcome"], row["steps"]) for row in rows] == [("done", 4)] * 2
    configs = [json.loads(RunFolder(Path(row["run_dir"])).config_file.read_text()) for row in rows]
    assert [config["optimizer"]["learning_rate"] for config in configs] == [2e-4, 4e-4]
    assert all(value in printed for value in POINTS)


def test_train_continues_the_run_and_its_model_is_evaluated_and_reported(swept, tmp_path):
    folder, _ = swept
    run = Path(json.loads((folder / "sweep.json").read_text())[0]["run_dir"])
    config = api.load_config(str(RunFolder(run).config_file))
    trained = api.train(config, {"run.num_updates": 8}, run_dir=run, on_output=None)
    assert trained.summary["steps"] == 8
    assert [row["step"] for row in trained.metrics() if row["kind"] == "step"] == list(range(1, 9))
    assert trained.model is not None
    found = api.evaluate(run_dir=run, out=tmp_path / "found.json", on_output=None, k=2)
    (of,) = found["sets"]
    assert found["step"] == 8 and of["k"] == 2 and 0 <= of["metrics"]["avg@2"]["value"] <= 1
    assert run.name in api.report(run, out=tmp_path / "report.html").read_text()
