"""The Python calls on a real run: trained, continued, evaluated and reported by `launch.api`."""

from pathlib import Path

import pytest

from launch import api
from tests.integration.support import jobs

pytestmark = [pytest.mark.integration, pytest.mark.engine]


def test_train_continues_the_run_and_its_model_is_evaluated_and_reported(tmp_path: Path, model: Path):
    run = tmp_path / "run"
    fields = jobs.SMALL | {"model.path": str(model), "optimizer.learning_rate": 4e-4}
    config = api.load_config("tiny", fields)
    assert api.train(config, {"run.num_updates": 4}, run_dir=run, on_output=None).summary["steps"] == 4
    trained = api.train(config, {"run.num_updates": 8}, run_dir=run, on_output=None)
    assert trained.summary["steps"] == 8
    assert [row["step"] for row in trained.metrics() if row["kind"] == "step"] == list(range(1, 9))
    assert trained.model is not None
    found = api.evaluate(run_dir=run, out=tmp_path / "found.json", on_output=None, k=2)
    (of,) = found["sets"]
    assert found["step"] == 8 and of["k"] == 2 and 0 <= of["metrics"]["avg@2"]["value"] <= 1
    assert run.name in api.report(run, out=tmp_path / "report.html").read_text()
