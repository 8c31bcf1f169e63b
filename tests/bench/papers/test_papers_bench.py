"""Inputs of the papers bench, its errors and its answers; short runs stand for the papers' own."""

import collections

import pytest

from launch.tools.plan.sim import simulate
from tests.bench.papers import __main__ as papers
from tests.bench.papers import inputs, rolloutpipe, rollpacker
from tests.bench.papers.answers import ANSWERS
from tests.bench.papers.experiment import Experiment, error

SETTINGS = {s.name: s for s in inputs.SETTINGS}


def test_told_shares_of_a_step_are_table_1s_mean_and_a_whole():
    assert pytest.approx((0.72 + 0.66 + 0.71) / 3) == inputs.ROLLOUT_SHARE
    assert pytest.approx(1.0) == inputs.ROLLOUT_SHARE + inputs.REWARD_SHARE + inputs.TRAINING_SHARE


def test_roofline_step_reads_weights_and_caches_once():
    setting = SETTINGS["14B/16k"]
    # 2 x 14.77e9 bytes over two GPUs of 3.35e12 B/s; a token's cache is 2 x 2 x 48 x 8 x 128 bytes.
    assert setting.step_s(0, 1000) == pytest.approx(29.54e9 / 6.7e12)
    assert setting.step_s(10, 1000) - setting.step_s(0, 1000) == pytest.approx(10 * 1000 * 196_608 / 6.7e12)
    assert [s.num_engines for s in inputs.SETTINGS] == [16, 16, 32]


def test_costs_make_a_synchronous_step_of_table_1s_shares(monkeypatch):
    monkeypatch.setattr(inputs, "NUM_ROUNDS", 1)
    setting = SETTINGS[inputs.CALIBRATED]
    costs = rollpacker.costs_of(setting, prompt_share=0.5, seed=3)
    rollout_s = rollpacker.rollout(setting, 1.0, 1.0, prompt_share=0.5, seed=3).step_s
    profile = rollpacker.profile_of(setting, costs, prompt_share=0.5, reward_s=costs.reward_s)
    step_s = simulate.simulate(rollpacker.config_of(1.0, 1.0), profile, num_updates=1, seed=3).step_s
    assert rollout_s / step_s == pytest.approx(inputs.ROLLOUT_SHARE, rel=0.01)
    assert costs.reward_s / step_s == pytest.approx(inputs.REWARD_SHARE, rel=0.01)


def test_calibrated_step_gives_serials_rollouts_and_nothing_else_is_fitted(monkeypatch):
    monkeypatch.setattr(inputs, "ROUNDS", 1)
    step = rolloutpipe.calibrate("Sci-XW", 0.5)
    wanted = {32: 191.8 * 0.495 / 0.505, 96: 526.0}
    for R, seconds in wanted.items():
        assert rolloutpipe.rollout_s("Sci-XW", R, step, 0.5) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("predicted", "published", "wanted"),
    [
        (1.1, 1.0, 0.1),
        (0.9, 1.0, 0.1),
        (1.5, (1.0, 2.0), 0.0),
        (2.5, (1.0, 2.0), 0.25),
        (0.5, (1.0, 2.0), 0.5),
        (-1.0, (1.0, float("inf")), 2.0),
    ],
)
def test_error_is_relative_and_to_the_nearest_bound_of_a_range(predicted, published, wanted):
    assert error(predicted, published) == pytest.approx(wanted)


def test_each_experiment_has_its_own_name_and_answers_are_of_known_experiments():
    names = collections.Counter(e.name for e in papers.EXPERIMENTS)
    assert max(names.values()) == 1 and ANSWERS.keys() <= names.keys()


def test_answer_without_a_prediction_is_an_error_and_a_prediction_without_an_answer_has_none(monkeypatch):
    one = Experiment(paper="P", where="Table 1", predict=dict, blind=True)
    monkeypatch.setattr(papers, "EXPERIMENTS", (one,))
    monkeypatch.setattr(papers, "ANSWERS", {one.name: {"a": 2.0}})
    rows = papers.compare({one.name: {"a": 1.0, "b": 3.0}})
    assert [r["error"] for r in rows] == [0.5, None] and [r["stated"] for r in rows] == ["2", None]
    found = papers.summary(rows)
    assert (found["num_predictions"], found["num_compared"], found["blind_num_compared"]) == (2, 1, 1)
    assert found["median_error"] == found["max_error"] == found["blind_max_error"] == found["p_max_error"] == 0.5
    # Inputs chosen in sight count apart.
    found = papers.summary([*rows, rows[0] | {"in_sight": True, "error": 9.0}])
    assert (found["max_error"], found["in_sight_max_error"]) == (0.5, 9.0)
    with pytest.raises(ValueError, match="not predicted: ..a"):
        papers.compare({one.name: {"b": 3.0}})
