"""The planner bench: the cases it reads, and the published formulas."""

import dataclasses
import json
from typing import Any

import pytest

from launch import plan_profile
from launch.plan_simulate import simulate
from tests.bench import cases, planner, planner_pipelinerl, planner_rolloutpipe
from tests.bench.cases import Case
from tests.launch.plan_setup import by_rounds, profile_of


def case_of(**fields) -> Case:
    defaults: dict[str, Any] = dict(
        name="cgp R=8",
        config=by_rounds(),
        profile=profile_of(),
        measured={"rollout_to_train_end_s": 30.0, "waiting_ratio": 0.5},
    )
    return Case(**(defaults | fields))


def test_cases_go_through_a_result_file_unchanged(tmp_path):
    path = tmp_path / "overlap.json"
    path.write_text(json.dumps({"bench": "overlap", **cases.to_json([case_of(), case_of(name="other")])}))
    assert cases.read(path) == [case_of(), case_of(name="other")]


def test_result_file_may_have_one_profile_and_numbers_that_the_planner_does_not_know(tmp_path):
    path = tmp_path / "inflight.json"
    (entry,) = cases.to_json([case_of()])["measured"]
    entry["measured"] = {"samples_per_s": 3.0, "ess": 0.9, "waiting_ratio": None}
    path.write_text(json.dumps({"profile": plan_profile.to_dict(profile_of()), "measured": [entry]}))
    assert cases.read(path) == [case_of(measured={"samples_per_s": 3.0})]


def test_result_file_without_good_cases_is_refused_by_name(tmp_path):
    path = tmp_path / "overlap.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="overlap.json has no measured runs"):
        cases.read(path)
    for spoil, says in (
        ({"measured": {"ess": 1.0, "profile": "cgp R=8"}}, "has none of"),
        ({"config": {"a": 1}}, "run 0"),
    ):
        raw = cases.to_json([case_of()])
        raw["measured"][0] |= spoil
        path.write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=says):
            cases.read(path)


def test_compare_gives_the_largest_error_over_times():
    truth = simulate(case_of().config, case_of().profile, num_updates=4).round_mean("rollout_to_train_end_s")
    right = case_of(measured={"rollout_to_train_end_s": truth})
    slow = case_of(measured={"rollout_to_train_end_s": truth * 1.25, "first_dispatch_s": 1e-3})
    assert cases.compare([right]) == pytest.approx(0.0)
    assert cases.compare([right, slow]) == pytest.approx(0.2)  # a dispatch's error doesn't count
    assert cases.compare([]) is None


def test_closed_formulas_are_the_papers():
    closed = planner_pipelinerl.closed()
    assert closed["r_gen"] == pytest.approx(16.9, rel=0.001)
    assert closed["r_train"] == pytest.approx(17.08)
    assert closed["r_conv"] == pytest.approx(10.7, rel=0.07)
    assert closed["speedup"] == pytest.approx(1.57, rel=0.07)
    assert closed["g_max"] in (132, 133)


def test_calibration_meets_the_serial_column():
    prediction = planner_rolloutpipe.predict(planner_rolloutpipe.CHOSEN)
    for R in (32, 96):
        assert prediction.serial_rollout_s[R] == pytest.approx(planner_rolloutpipe.rollout_s(R), rel=1e-3)
    assert planner_rolloutpipe.affine() == (pytest.approx(57.96, abs=0.01), pytest.approx(4.682, abs=0.001))


def test_value_that_could_not_be_computed_is_null_and_not_met():
    aims = planner.aims_of({"max_rel_error_real": None, "pipelinerl_speedup": 1.6, "cgp_s": 700.0, "cgp_fgd_s": 642.0})
    assert aims["max_rel_error_real"] == {"value": None, "aim": 0.15, "met": False}
    assert [aims[k]["met"] for k in ("pipelinerl_speedup", "cgp_s", "cgp_fgd_s")] == [True, False, True]


def test_bench_without_results_says_which_to_run(tmp_path):
    real, missing = planner.measured_runs(tmp_path)
    assert real == {}
    assert set(missing) == set(planner.BENCHES)
    (tmp_path / "tail.json").write_text(json.dumps(cases.to_json([case_of()])))
    real, missing = planner.measured_runs(tmp_path)
    assert [dataclasses.asdict(e)["metric"] for e in real["tail"]] == ["rollout_to_train_end_s", "waiting_ratio"]
