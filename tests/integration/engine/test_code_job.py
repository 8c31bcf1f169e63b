"""The main job on code: functions that the policy writes, run in real sandboxes."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest

from actor.sandbox.program import SandboxUnavailableError
from actor.sandbox.self_test import check_isolation
from bridge.rollout_types import Verdict
from configs import overrides
from configs.model_sizes import TinyModelRecipe
from configs.presets import tiny
from configs.tasks.code_functions import row
from launch.startup.preflight import check_model
from launch.startup.warmup import make_tiny_model
from tests.integration.support import jobs

pytestmark = [pytest.mark.integration, pytest.mark.engine]

BAD_ROWS = {1: "def f(x):return None", 40: "def f(x):return (x"}
"""Rows, from 1, whose own solution is none."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of functions to write."""
    try:
        check_isolation()
    except SandboxUnavailableError as e:
        pytest.skip(str(e))
    rows = [row(0, i) for i in range(120)]
    for number, solution in BAD_ROWS.items():
        rows[number - 1]["metadata"]["solution"] = solution
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    file.write_text("".join(json.dumps(made) + "\n" for made in rows))
    return file


@pytest.fixture(scope="module")
def writer(tasks: Path) -> Path:
    """A model that writes some of them right."""
    config = tiny.tiny_code()
    prompts = dataclasses.replace(config.prompts, path=str(tasks))
    folder = tasks.parent / "model"
    make_tiny_model(folder, TinyModelRecipe(num_clean_steps=100, num_typo_steps=40), prompts)
    check_model(config, folder)
    return folder


def test_run_on_code_sets_wrong_rows_aside_and_trains_on_answers_right_and_wrong(tasks: Path, writer: Path):
    job = jobs.start(
        tasks.parent / "run",
        writer,
        config="tiny_code",
        prompts__path=tasks,
        rewards__check_gold_answers=3,
        evaluation__num_problems=4,
        run__num_updates=4,
        rounds__groups_per_update=4,
        admission__width=4,
    )
    try:
        output = job.finish()
    finally:
        job.end()
    assert "code rewards run in sandboxes: Python" in output
    assert "reference answers: 1 of 3 rows fail; checking all 120 rows" in output
    gold_failures = [json.loads(line) for line in (job.folder / "quarantine.jsonl").read_text().splitlines()]
    assert [bad["row"] for bad in gold_failures] == list(BAD_ROWS)
    assert all(bad["reason"] == "reference answer fails: verifier code returns wrong" for bad in gold_failures)
    jobs.check_every_group_trained_once(job, num_updates=4, per_update=4)
    steps = job.rows("step")
    assert 0 < sum(r["reward/mean"] for r in steps) / len(steps) < 1
    counts = {v: sum(r[f"verdicts/{v}"] for r in steps) for v in (*get_args(Verdict), "unscored")}
    assert counts["ok"] > 0 and counts["wrong"] > 0 and sum(counts.values()) == sum(r["sequences"] for r in steps)
    assert sum(r["reward/mean"] * r["sequences"] for r in steps) == pytest.approx(
        counts["ok"]
    )  # and nothing else earns
    assert overrides.from_dict(json.loads((job.folder / "config.json").read_text())).prompts.parts == {"code": 1.0}
