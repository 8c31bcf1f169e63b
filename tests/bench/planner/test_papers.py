"""What the planner is told of two papers, and the page that compares; short runs stand for the papers' own."""

import dataclasses
import json

import pytest

from launch.tools.plan.sim import simulate
from tests.bench.planner import inputs, papers, rolloutpipe_rounds, rollpacker
from tests.bench.planner.papers import TailBatching
from tests.bench.planner.rolloutpipe_rounds import Rounds, Step

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
    step = rolloutpipe_rounds.calibrate("Sci-XW", 0.5)
    wanted = {32: 191.8 * 0.495 / 0.505, 96: 526.0}
    for R, seconds in wanted.items():
        assert rolloutpipe_rounds.rollout_s("Sci-XW", R, step, 0.5) == pytest.approx(seconds, rel=0.01)


def found(scale: float) -> list[TailBatching]:
    speedups = {n: {row: v * scale for row, v in rows.items()} for n, rows in papers.TABLE_2.items()}
    figure = {n: {"R 1.25": 0.9, "P 1.25": 0.6, "P, R 1.25": 0.5} for n in papers.TABLE_2}
    return [
        TailBatching(prompt_share=share, seed=seed, speedups=speedups, figure_11=figure if seed == 0 else {})
        for share, seed in papers.draws()
    ]


def rounds_of(workload: str, R: int, sigma: float) -> Rounds:
    by_name = {"serial": 100.0, "cgp": 70.0, "cgp_fgd": 60.0}
    return Rounds(
        workload=workload,
        R=R,
        sigma=sigma,
        step=Step(base_s=1e-3, sequence_s=1e-4),
        total_s=by_name,
        waiting_ratio=by_name,
        first_dispatch_s=by_name,
    )


ROUNDS = [rounds_of(w, R, s) for w in inputs.COMPUTE_S for R in (32, 64, 96) for s in inputs.SIGMAS]


@pytest.mark.parametrize(("scale", "met"), [(1.0, True), (1.14, True), (0.86, True), (1.16, False), (0.8, False)])
def test_aim_is_the_largest_error_of_table_2(scale, met):
    values = papers.flat_values(found(scale), ROUNDS)
    assert values["table_2_max_rel_error"] == pytest.approx(abs(scale - 1))
    assert papers.aims_of(values)["table_2_max_rel_error"]["met"] is met
    assert values["reduction_OlyPhys_R64_cgp"] == pytest.approx(0.3)
    assert json.loads(json.dumps(values)) == values and all(isinstance(v, float) for v in values.values())


def test_inputs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SETTINGS["7B/8k"].num_gpus = 8  # pyright: ignore[reportAttributeAccessIssue]
