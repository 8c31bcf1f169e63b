"""The planner bench: the cases it reads, and the published formulas."""

import dataclasses
import json

import pytest

from launch.plan_simulate import simulate
from tests.bench import cases, planner, planner_pipelinerl, planner_rolloutpipe
from tests.bench.cases import Case
from tests.launch.plan_setup import lengths, profile_of


def case_of(**fields) -> Case:
    defaults = dict(
        name="cgp R=16",
        preset="configs/cgp.py:tiny",
        overrides={"rounds.groups_per_round": "16", "run.num_updates": "1"},
        profile=profile_of(response_tokens=lengths(100)),
        num_updates=2,
        measured={"rollout_to_train_end_s": 30.0},
    )
    return Case(**(defaults | fields))


def test_cases_go_through_a_result_file_unchanged(tmp_path):
    path = tmp_path / "overlap.json"
    path.write_text(json.dumps({"bench": "overlap", "cases": cases.to_json([case_of()])}))
    assert cases.read(path) == [case_of()]


def test_result_file_without_good_cases_is_refused_by_name(tmp_path):
    path = tmp_path / "overlap.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="overlap.json has no cases"):
        cases.read(path)
    (bad,) = cases.to_json([case_of()])
    bad["measured"] = {"speed": 1.0}
    path.write_text(json.dumps({"cases": [bad]}))
    with pytest.raises(ValueError, match="case 0"):
        cases.read(path)


def test_compare_gives_the_largest_error_over_times():
    truth = simulate(case_of().config, case_of().profile, num_updates=2).round_mean("rollout_to_train_end_s")
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
    (tmp_path / "tail.json").write_text(json.dumps({"cases": cases.to_json([case_of()])}))
    real, missing = planner.measured_runs(tmp_path)
    assert [dataclasses.asdict(e)["metric"] for e in real["tail"]] == ["rollout_to_train_end_s"]
