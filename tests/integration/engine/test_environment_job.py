"""The main job on environments: episodes of several turns, each in a process of its own, with real vLLM."""

from pathlib import Path

import pytest

from configs.model_sizes import TinyModelRecipe
from configs.presets import tiny
from configs.schema import Config
from launch.startup.preflight import check_model
from launch.startup.warmup import make_tiny_model
from tests.integration.support import jobs

pytestmark = [pytest.mark.integration, pytest.mark.engine]

PLAYS: dict[str, Config] = {"tiny_guess": tiny.tiny_guess(), "tiny_calculator": tiny.tiny_calculator()}


@pytest.fixture(scope="module", params=[pytest.param("tiny_guess", marks=pytest.mark.nightly), "tiny_calculator"])
def preset(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def player(preset: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen such episodes."""
    config, folder = PLAYS[preset], tmp_path_factory.mktemp(preset) / "model"
    make_tiny_model(folder, TinyModelRecipe(num_clean_steps=100, num_typo_steps=20), config.prompts)
    check_model(config, folder)
    return folder


def test_run_trains_on_what_was_sampled_and_on_nothing_that_was_said(preset: str, player: Path):
    job = jobs.start(
        player.parent / "run",
        player,
        config=preset,
        evaluation__num_problems=4,
        run__num_updates=4,
        rounds__groups_per_update=4,
        admission__width=4,
    )
    try:
        job.finish()
    finally:
        job.end()
    jobs.check_every_group_trained_once(job, num_updates=4, per_update=4)
    steps = job.rows("step")
    assert any(s["turns/mean"] > 1 for s in steps) and all(s["response/observation_tokens"] > 0 for s in steps)
    assert all(s["actor/episode_failures"] == 0 for s in steps)
    # The learner computes what the engine said of each sampled token: a token off, or an observation among them, and
    # they would be nats apart.
    apart = [s["max_abs_dlogprob_lag0"] for s in steps if s["max_abs_dlogprob_lag0"] is not None]
    assert apart and max(apart) < 1e-3
    assert job.rows("eval") and all(r["eval/turns"] >= 1 for r in job.rows("eval"))
