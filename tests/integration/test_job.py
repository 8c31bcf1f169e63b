"""The main job, whole: supervisor, learner, a real vLLM actor, store, snapshots."""

import json
import signal
from pathlib import Path

import pytest

from tests.integration.support import jobs
from tests.integration.support.models import make_folder
from tests.integration.support.processes import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.engine]
NUM_ROUNDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), family="qwen3", tied=True)


def check_every_group_trained_once(
    job: jobs.Job, *, num_updates: int, per_update: int, by_window: bool = False
) -> None:
    rows = job.rows("step")
    assert [r["step"] for r in rows] == list(range(1, num_updates + 1))
    trained = [i for r in rows for i in r["groups"]]
    assert all(len(r["groups"]) == per_update for r in rows)
    assert len(trained) == len(set(trained))
    if not by_window:  # there a group may overtake others, and the last ones are still out at the end
        assert sorted(trained) == [f"{i:09d}" for i in range(num_updates * per_update)]


def first_training_and_last_rollout(job: jobs.Job, round_: int) -> tuple[float, float]:
    """When a round's training began and when its last group was in, Unix seconds."""
    groups = {e["args"]["ticket"]: e for e in job.events("reward") if e["args"]["round"] == round_}
    groups = {t: e for t, e in groups.items() if e["args"]["kind"] == "train"}
    ends = [e["ts"] + e["dur"] for e in groups.values()]
    starts = [e["ts"] for e in job.events("train") if set(e["args"]["groups"].split(",")) & set(groups)]
    return min(starts) / 1e6, max(ends) / 1e6


def test_rolloutpipe_run_trains_before_the_round_is_complete_and_leaves_everything(tmp_path: Path, model: Path):
    # Long rounds (eight frontiers of 40 tokens one after the other), so that a learner that gets no core for a
    # while still begins before the round is over.
    job = jobs.start(
        tmp_path / "run",
        model,
        run__num_updates=24,
        rounds__groups_per_round=16,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
    )
    try:
        output = job.finish()
    finally:
        job.end()
    check_every_group_trained_once(job, num_updates=24, per_update=2)
    # Training overlaps generation. Not in every round of a second for sure: the first compiles, and on two cores the
    # learner may get none while a checkpoint is written. (schedule/test_stream.py shows that it never waits.)
    overlaps = [first_training_and_last_rollout(job, round_) for round_ in range(NUM_ROUNDS)]
    assert any(training < rollout for training, rollout in overlaps)
    # Parity after every publish, in float32.
    probes = job.rows("probe")
    assert [p["step"] for p in probes] == [0, 8, 16, 24]
    assert max(p["parity/max_abs_dlogprob"] for p in probes) <= 1e-4
    # A round's weights are fixed: its eight updates train at lag 0 to 7.
    assert [r["lag/max"] for r in job.rows("step")] == list(range(8)) * NUM_ROUNDS
    assert all(r["actor/pause_s"] > 0 for r in job.rows("step")[8:])
    evals = job.rows("eval")
    assert [e["version"] for e in evals] == ["0:0", "0:24"] and all(e["problems"] == 200 for e in evals)
    # What people see.
    assert "held-out reward, end" in output and "waiting ratio (eq. 4)" in output
    trace = json.loads((job.folder / "trace.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert tracks == {"learner", "actor-0"}
    assert {"rollout", "reward", "train", "publish", "pause"} <= {e["name"] for e in trace}
    assert list((job.folder / "tensorboard").iterdir()) and (job.folder / "checkpoints" / "24").is_dir()
    assert (job.folder / "model-24" / "model.safetensors").is_file()
    summary = json.loads((job.folder / "summary.json").read_text())
    print(f"rolloutpipe waiting ratio eq. 4: {summary['waiting_ratio_eq4']:.3f}, 5.1: {summary['waiting_ratio']:.3f}")


OBJECTIVE = """
import jax
import jax.numpy as jnp
import numpy as np

def loss(logprobs, inputs, *, max_weight: float, clip_low: float = 0.5):
    flat = 1e-3 * (logprobs - jax.lax.stop_gradient(logprobs))  # a gradient, and no value
    return flat + max_weight * inputs.advantages, jnp.ones_like(inputs.loss_mask)

def advantage(rewards, config):
    return np.where(rewards >= 100, 3.0, 0.0)
"""
JUDGE = """
import zlib

def score(response_text, task):
    assert task.answer
    return 100 + zlib.crc32(response_text.encode()) / 2**32
"""


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[jobs.Job, str]:
    """A serial run, done, with functions of the user's own from the directory in which it was started; its output."""
    here = tmp_path_factory.mktemp("here")
    (here / "objective.py").write_text(OBJECTIVE)
    (here / "judge.py").write_text(JUDGE)
    job = jobs.start(
        here / "run",
        model,
        config="configs/serial.py:tiny",
        cwd=here,
        admission__width=0,
        loss__name="objective:loss",
        loss__max_weight=2,
        loss__advantage="objective:advantage",
        prompts__verifier="judge:score",
        prompts__truncated="keep",  # every response is judged, those that the token limit cut off too
    )
    try:
        return job, job.finish()
    finally:
        job.end()


def test_serial_run_trains_only_once_the_round_is_complete(serial: tuple[jobs.Job, str]):
    job, _ = serial
    check_every_group_trained_once(job, num_updates=12, per_update=2)
    for round_ in range(NUM_ROUNDS):
        training, rollout = first_training_and_last_rollout(job, round_)
        assert training > rollout
    summary = json.loads((job.folder / "summary.json").read_text())
    print(f"serial waiting ratio eq. 4: {summary['waiting_ratio_eq4']:.3f}, 5.1: {summary['waiting_ratio']:.3f}")


def test_run_with_ones_own_loss_advantage_and_verifier_trains_by_each_of_them(serial: tuple[jobs.Job, str]):
    job, output = serial
    names = "loss.name=objective:loss, loss.advantage=objective:advantage, prompts.verifier=judge:score"
    assert f"functions of your own: {names}" in output
    rows = job.rows("step")
    # The verifier's rewards, not 0 or 1; the advantage 3 of every response, whose mean would be 0 otherwise; and the
    # loss, whose value is max_weight times that.
    assert all(100 <= r["reward/min"] < r["reward/max"] < 101 for r in rows)
    assert [r["loss"] for r in rows] == pytest.approx([6.0] * 12)
    assert all(r["clip_fraction"] == 1 and r["grad_norm"] > 0 for r in rows)
    assert all(100 <= e["eval/reward"] < 101 for e in job.rows("eval"))
    written = json.loads((job.folder / "loss.json").read_text())
    assert {k: written[k] for k in ("name", "advantage", "max_weight", "clip_low")} == {
        "name": "objective:loss",
        "advantage": "objective:advantage",
        "max_weight": 2.0,
        "clip_low": 0.5,
    }
    assert "loss name=objective:loss max_weight=2.0" in (job.folder / "logs" / "learner.log").read_text()


def test_rolloutpipe_run_goes_on_when_its_actor_is_killed_inside_a_round(tmp_path: Path, model: Path):
    job = jobs.start(
        tmp_path / "run",
        model,
        run__num_updates=24,
        rounds__groups_per_round=16,
        sampling__max_response_tokens=40,
        model__max_tokens=64,
    )
    try:
        job.wait_for_step(11)  # inside the second round of eight updates
        jobs.sigkill(job.pid("actor"))
        output = job.finish()
    finally:
        job.end()
    assert "actor-0 was killed by signal 9" in output
    check_every_group_trained_once(job, num_updates=24, per_update=2)
    # The round's weights stayed the same over the death of its actor.
    assert [r["lag/max"] for r in job.rows("step")] == list(range(8)) * NUM_ROUNDS


def test_pipelinerl_run_killed_learner_and_killed_actor_train_every_group_once(tmp_path: Path, model: Path):
    job = jobs.start(
        tmp_path / "run",
        model,
        config="configs/pipelinerl.py:tiny",
        admission__width=0,
        admission__sequences=24,
        run__num_updates=60,
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
    check_every_group_trained_once(job, num_updates=60, per_update=2, by_window=True)
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
