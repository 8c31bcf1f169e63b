"""The main job by serial rounds, with functions of the user's own: one run, and what several tests see of it."""

import json
from pathlib import Path

import pytest

from tests.integration.support import jobs

pytestmark = [pytest.mark.integration, pytest.mark.engine]
NUM_ROUNDS = 3

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
        config="serial:tiny",
        cwd=here,
        admission__width="auto",
        actor__colocated=True,
        loss__name="objective:loss",
        loss__max_weight=2,
        loss__advantage="objective:advantage",
        prompts__verifier="judge:score",
        prompts__truncated_responses="keep",  # every response is judged, those that the token limit cut off too
    )
    try:
        return job, job.finish()
    finally:
        job.end()


def test_serial_run_trains_only_once_the_round_is_complete(serial: tuple[jobs.Job, str]):
    job, _ = serial
    jobs.check_every_group_trained_once(job, num_updates=12, per_update=2)
    for round_ in range(NUM_ROUNDS):
        training, rollout = jobs.first_training_and_last_rollout(job, round_)
        assert training > rollout
    assert all(0 < p["parity/max_abs_dlogprob"] < 1e-4 for p in job.rows("probe"))  # scored in the learner's turns
    # The engine stood down for each round's training, and at the run's end.
    training_s = sorted((e["ts"], e["ts"] + e["dur"]) for e in job.events("train"))
    down_s = [(e["ts"], e["ts"] + e["dur"]) for e in job.events("stand down")]
    assert len(down_s) >= NUM_ROUNDS - 1
    last_round_s = training_s[-len(training_s) // NUM_ROUNDS :]
    for start_s, end_s in training_s[: -len(last_round_s)]:
        assert any(begin <= start_s and end_s <= end for begin, end in down_s)
    summary = json.loads((job.folder / "summary.json").read_text())
    print(f"serial waiting ratio eq. 4: {summary['waiting_ratio_eq4']:.3f}, 5.1: {summary['waiting_ratio']:.3f}")


def test_run_with_ones_own_loss_advantage_and_verifier_trains_by_each_of_them(serial: tuple[jobs.Job, str]):
    job, output = serial
    names = "loss.name=objective:loss, loss.advantage=objective:advantage, prompts.verifier=judge:score"
    assert f"custom functions: {names}" in output
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
