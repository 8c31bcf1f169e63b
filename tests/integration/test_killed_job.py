"""The main job when its processes are killed or interrupted."""

import signal
from pathlib import Path

import pytest

from tests.integration.support import jobs
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine]
NUM_ROUNDS = 3


@pytest.mark.nightly  # daily: the actor that is killed in the test below, and whose engine is in test_many_engines.py
def test_rolloutpipe_run_goes_on_when_its_actor_is_killed_inside_a_round(tmp_path: Path, model: Path):
    # Rounds of seconds, so that what looks at the run late still finds it inside the second one or the third.
    job = jobs.start_long_rounds(tmp_path / "run", model, updates_per_round=32)
    try:
        job.wait_for_step(34)
        jobs.sigkill(job.pid("actor"))
        output = job.finish()
    finally:
        job.end()
    assert "actor-0 was killed by signal 9" in output
    jobs.check_every_group_trained_once(job, num_updates=32 * NUM_ROUNDS, per_update=2)
    # The round's weights stayed the same over the death of its actor.
    assert [r["lag/max"] for r in job.rows("step")] == list(range(32)) * NUM_ROUNDS


def test_pipelinerl_run_killed_learner_and_killed_actor_train_every_group_once(tmp_path: Path, model: Path):
    job = jobs.start(
        tmp_path / "run",
        model,
        config="pipelinerl:tiny",
        admission__width="auto",
        admission__sequences=24,
        run__num_updates=160,
        checkpoint__every_n_steps=8,
        sampling__max_response_tokens=12,
    )
    try:
        job.wait_for_checkpoint(8)  # written in the background: at step 10 it may not be there yet
        job.wait_for_step(10)
        learner = job.pid("learner")
        jobs.sigkill(learner)
        job.wait_for_step(20)
        actor = job.pid("actor")
        jobs.sigkill(actor)
        output = job.finish()
    finally:
        job.end()
    jobs.check_every_group_trained_once(job, num_updates=160, per_update=2, by_window=True)
    assert "learner was killed by signal 9" in output and "actor-0 was killed by signal 9" in output
    incarnations = [r["incarnation"] for r in job.rows("step")]
    assert incarnations == sorted(incarnations) and set(incarnations) == {0, 1}
    # Where the learner went back to its checkpoint, what it had trained since is set aside, not counted twice.
    resumed_at = incarnations.index(1)
    assert resumed_at % 8 == 0
    assert max(r["lag/max"] for r in job.rows("step")) >= 1
    assert max(p["parity/max_abs_dlogprob"] for p in job.rows("probe")) <= 1e-4


def test_interrupted_run_ends_cleanly_and_a_killed_supervisor_takes_its_children_along(tmp_path: Path, model: Path):
    job = jobs.start(tmp_path / "run", model, run__num_updates=4000)
    try:
        job.wait_for_step(8)
        children = jobs.descendants(job.process.pid)
        assert len(children) >= 3  # the learner, the actor and its engine
        job.process.send_signal(signal.SIGINT)
        job.process.communicate(timeout=120)
        assert job.process.returncode == 130
        wait_until(lambda: not any(map(jobs.is_alive, children)), "the children's end", deadline_s=90)
        reached = job.rows("step")[-1]["step"]

        job = jobs.start(tmp_path / "run", model, run__num_updates=4000)  # the same command goes on
        job.wait_for_step(reached + 4)
        assert job.rows("step")[-1]["incarnation"] == 1
        children = jobs.descendants(job.process.pid)
        assert len(children) >= 3
        jobs.sigkill(job.process.pid)
        wait_until(lambda: not any(map(jobs.is_alive, children)), "the children's end", deadline_s=90)
    finally:
        job.end()
