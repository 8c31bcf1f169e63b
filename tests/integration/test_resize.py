"""The main job with engines that change: other limits mid-run, and each way a publish treats running requests."""

from pathlib import Path

import pytest

from tests.integration.support import jobs
from tests.integration.support.models import make_folder
from tests.integration.test_job import check_every_group_trained_once

pytestmark = [pytest.mark.integration, pytest.mark.engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)


def test_engine_restarted_with_other_limits_rejoins_and_nothing_is_lost(tmp_path: Path, model: Path):
    job = jobs.start(
        tmp_path / "run",
        model,
        run__num_updates=32,
        rounds__groups_per_round=16,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
        actor__max_restarts=0,  # what is asked for is no failure
        actor__elastic=True,
    )
    try:
        job.wait_for_step(3)
        first = job.pid("actor")
        limits = job.folder / "limits" / "actor-0.json"
        limits.parent.mkdir(exist_ok=True)
        limits.write_text('{"max_num_seqs": 4}')
        output = job.finish()
    finally:
        job.end()
    assert output.count("actor-0 starts again with other engine limits") == 1
    assert "was killed" not in output and "ended with" not in output
    check_every_group_trained_once(job, num_updates=32, per_update=2)
    assert [r["lag/max"] for r in job.rows("step")] == list(range(8)) * 4  # the round's weights stayed the same
    assert [e["args"]["max_num_seqs"] for e in job.events("start engine")] == [32, 4]
    assert len(job.events("leave")) == 1
    (beat,) = [b for b in job.heartbeats() if b.role == "actor"]
    assert beat.process == "actor-0" and beat.pid != first
    assert beat.report is not None
    assert beat.report.max_sequences == 4 and 0 < beat.report.kv_usage_peak < 1
    # No response was begun in vain: each group's rollout is there once.
    tickets = [e["args"]["ticket"] for e in job.events("rollout") if e["args"]["kind"] == "train"]
    assert len(tickets) == len(set(tickets)) == 64


def test_limits_that_no_engine_starts_with_are_put_aside(tmp_path: Path, model: Path):
    job = jobs.start(tmp_path / "run", model, run__num_updates=16, actor__max_restarts=0)
    try:
        job.wait_for_step(3)
        limits = job.folder / "limits" / "actor-0.json"
        limits.parent.mkdir(exist_ok=True)
        limits.write_text('{"max_num_seqs": 1000000000}')
        output = job.finish()
    finally:
        job.end()
    assert output.count("actor-0 starts again with other engine limits") == 2
    check_every_group_trained_once(job, num_updates=16, per_update=2)
    assert not limits.exists() and limits.with_suffix(".refused.json").is_file()
    assert "the engine did not start with the limits of" in (job.folder / "logs" / "actor-0.log").read_text()
    assert [e["args"]["max_num_seqs"] for e in job.events("start engine")] == [32, 10**9, 32]


@pytest.mark.parametrize("at_publish", ["drain", "abort_and_resume"])
def test_run_that_publishes_in_flight_trains_every_group_once(tmp_path: Path, model: Path, at_publish: str):
    job = jobs.start(
        tmp_path / "run",
        model,
        config="configs/pipelinerl.py:tiny",
        admission__width=6,
        run__num_updates=30,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
        publish__at_publish=at_publish,
    )
    try:
        job.finish()
    finally:
        job.end()
    check_every_group_trained_once(job, num_updates=30, per_update=2)
    rollouts = [e["args"] for e in job.events("rollout") if e["args"]["kind"] == "train"]
    num_mixed = sum(r["min_step"] < r["max_step"] for r in rollouts)
    print(f"{at_publish}: {num_mixed} of {len(rollouts)} groups are of several versions")
    assert (num_mixed == 0) == (at_publish == "drain")
    assert max(p["parity/max_abs_dlogprob"] for p in job.rows("probe")) <= 1e-4
