"""The main job with engines that change: other limits mid-run, and each way a publish treats running requests."""

from pathlib import Path

import pytest

from bridge.heartbeat_types import Heartbeat
from tests.integration.support import jobs
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine]


def write_limits(job: jobs.Job, max_num_seqs: int) -> Path:
    file = job.folder / "limits" / "actor-0.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'{{"max_num_seqs": {max_num_seqs}}}')
    return file


def actors_beat(job: jobs.Job) -> Heartbeat:
    (beat,) = [b for b in job.heartbeats() if b.role == "actor"]
    return beat


def test_engine_restarted_with_other_limits_rejoins_and_those_it_cannot_have_are_put_aside(tmp_path: Path, model: Path):
    job = jobs.start(
        tmp_path / "run",
        model,
        run__num_updates=128,
        rounds__groups_per_round=64,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
        actor__max_restarts=0,  # what is asked for is no failure
        actor__elastic=True,
    )
    try:
        job.wait_for_step(3)
        first = job.pid("actor")
        write_limits(job, 4)

        def serves_with_four() -> bool:
            beat = actors_beat(job)
            report = beat.report
            return beat.pid != first and report is not None and report.max_sequences == 4 and report.kv_usage_peak > 0

        wait_until(serves_with_four, "the engine of four sequences", deadline_s=400)
        beat = actors_beat(job)
        assert beat.process == "actor-0" and beat.report is not None and beat.report.kv_usage_peak < 1
        limits = write_limits(job, 10**9)
        output = job.finish()
    finally:
        job.end()
    assert output.count("actor-0 with new engine limits") == 3
    assert "was killed" not in output and "ended with" not in output
    assert not limits.exists() and limits.with_suffix(".refused.json").is_file()
    assert "engine start failed with the limits of" in (job.folder / "logs" / "actor-0.log").read_text()
    assert [e["args"]["max_num_seqs"] for e in job.events("start engine")] == [32, 4, 10**9, 32]
    assert len(job.events("shutdown")) == 2
    jobs.check_every_group_trained_once(job, num_updates=128, per_update=2)
    assert [r["lag/max"] for r in job.rows("step")] == list(range(32)) * 4  # the round's weights stayed the same
    # No response was begun in vain: each group's rollout is there once.
    tickets = [e["args"]["ticket"] for e in job.events("rollout") if e["args"]["kind"] == "train"]
    assert len(tickets) == len(set(tickets)) == 256


@pytest.mark.parametrize("at_publish", [pytest.param("drain", marks=pytest.mark.nightly), "abort_and_resume"])
def test_run_that_publishes_in_flight_trains_every_group_once(tmp_path: Path, model: Path, at_publish: str):
    job = jobs.start(
        tmp_path / "run",
        model,
        config="pipelinerl:tiny",
        admission__width="auto",
        admission__sequences=24,
        admission__queue_groups=100,  # a slow learner holds nothing back, so responses are always in progress
        run__num_updates=30,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
        publish__at_publish=at_publish,
    )
    try:
        job.finish()
    finally:
        job.end()
    jobs.check_every_group_trained_once(job, num_updates=30, per_update=2, by_window=True)
    rollouts = [e["args"] for e in job.events("rollout") if e["args"]["kind"] == "train"]
    num_mixed = sum(r["min_step"] < r["max_step"] for r in rollouts)
    print(f"{at_publish}: {num_mixed} of {len(rollouts)} groups are of several versions")
    assert (num_mixed == 0) == (at_publish == "drain")
    assert max(p["parity/max_abs_dlogprob"] for p in job.rows("probe")) <= 1e-4
