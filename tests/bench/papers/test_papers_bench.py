"""What the planner is told of two papers; short runs stand for the papers' own."""

import pytest

from launch.tools.plan.sim import simulate
from tests.bench.papers import inputs, rolloutpipe, rollpacker

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
