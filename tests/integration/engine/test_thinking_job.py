"""The main job on a model whose chat template opens `<think>`: answers are read behind the thinking, with real vLLM."""

import json
from pathlib import Path

import pytest

from configs import tiny
from configs.tiny_model import TinyModelRecipe
from launch.preflight import check_model
from learner.warmup import make_tiny_model
from tests.integration.support import jobs

pytestmark = [pytest.mark.integration, pytest.mark.engine]

SIZES = dict(model__max_tokens=64, sampling__max_response_tokens=12, packing__row_tokens=256)
"""Room for the turns' marks, and for the thinking."""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen sums worked out in its thinking."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    make_tiny_model(folder, TinyModelRecipe(thinks=True), tiny.get_config().prompts)
    check_model(tiny.get_config(), folder)
    return folder


def test_run_on_a_model_that_thinks_learns_answers_behind_its_thinking_and_tells_how_long_that_is(thinker: Path):
    job = jobs.start(
        thinker.parent / "run",
        thinker,
        run__num_updates=24,
        rounds__groups_per_round=24,
        rounds__groups_per_update=8,
        rounds__samples_per_group=8,
        admission__width=8,
        actor__max_num_seqs=64,
        packing__rows=4,
        checkpoint__every_n_steps=24,
        evaluation__num_problems=128,
        **SIZES,
    )
    try:
        job.finish()
    finally:
        job.end()
    steps, evaluations = job.rows("step"), job.rows("eval")
    assert evaluations[-1]["eval/reward"] > evaluations[0]["eval/reward"] + 0.05
    # A partial sum of two terms of one digit, its mark: two or three tokens, where nothing is mistyped.
    assert all(1.5 < s["response/thinking_tokens"] < 6 for s in (*steps,))
    assert all(1.5 < e["eval/thinking_tokens"] < 6 for e in evaluations)
    assert any(s["response/thinking_unfinished"] > 0 for s in steps)
    assert evaluations[-1]["eval/thinking_unfinished"] <= evaluations[0]["eval/thinking_unfinished"]
    responses = [
        r for line in (job.folder / "samples.jsonl").read_text().splitlines() for r in json.loads(line)["responses"]
    ]
    unfinished = [r for r in responses if "</think>" not in r["text"]]
    assert all(r["reward"] == 0 for r in unfinished)
    assert any(r["reward"] == 1 and r["thinking_tokens"] for r in responses)
