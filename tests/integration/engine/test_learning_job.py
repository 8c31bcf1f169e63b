"""The main job with a critic, a correction and Muon, and with a mixture of experts whose routing is replayed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.support import jobs
from tests.integration.support.models import make_folder

pytestmark = [pytest.mark.integration, pytest.mark.engine]
NUM_UPDATES = 8
JUDGE = """
import zlib

def score(response_text, task):
    return zlib.crc32(response_text.encode()) / 2**32
"""
"""A random model earns no rewards of sums."""


def finished(here: Path, model: Path, **fields: Any) -> jobs.Job:
    """A job that has ended, with each group trained once and the engine's weights equal to the learner's."""
    (here / "judge.py").write_text(JUDGE)
    fields |= {
        "run__num_updates": NUM_UPDATES,
        "prompts__verifier": "judge:score",
        "prompts__truncated_responses": "keep",
    }
    job = jobs.start(here / "run", model, cwd=here, **fields)
    try:
        job.finish()
    finally:
        job.end()
    jobs.check_every_group_trained_once(job, num_updates=NUM_UPDATES, per_update=2)
    assert job.rows("probe") and all(0 < p["parity/max_abs_dlogprob"] < 1e-4 for p in job.rows("probe"))
    return job


def test_critic_learns_beside_a_policy_with_a_correction_and_muon(model: Path, tmp_path: Path):
    job = finished(
        tmp_path,
        model,
        loss__name="ppo_clip",
        loss__advantage="gae",
        loss__correction__weight="token",
        rounds__epochs=2,
        critic__learning_rate=3e-3,
        optimizer__name="muon",
        rounds__filter_zero_variance=False,
    )
    rows = job.rows("step")
    assert rows[0]["critic/mean_value"] == 0  # its head starts with zeros
    assert rows[-1]["critic/mean_return"] > 0.2 and rows[-1]["critic/mean_value"] > 0.02
    # Groups of an update were sampled by its weights or by earlier ones.
    ratios = [row["correction/ratio_max"] for row in rows]
    assert all(np.isfinite(ratios)) and max(ratios) > 1 + 1e-5
    assert all(row["grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows)


def test_every_response_of_a_mixture_of_experts_is_trained_with_its_engines_routing(tmp_path: Path):
    model = make_folder(tmp_path / "model", family="qwen3_moe", tied=False)
    job = finished(tmp_path, model, model__routing_replay=True, actor__prefix_caching=True)
    rows = job.rows("step")
    assert [row["routing/captured"] for row in rows] == [1.0] * NUM_UPDATES
    assert all(1 <= row["routing/max_load"] <= 2 for row in rows)  # each token has 2 of 4 experts
