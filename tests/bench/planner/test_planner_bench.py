"""The planner bench: the cases it reads, and the published formulas."""

from typing import Any

import pytest

from launch.tools.plan.sim.simulate import simulate
from tests.bench.papers import pipelinerl
from tests.bench.planner import cases
from tests.bench.planner.cases import Case
from tests.launch.tools.plan.setup import by_rounds, profile_of


def case_of(**fields) -> Case:
    defaults: dict[str, Any] = dict(
        name="cgp R=8",
        config=by_rounds(),
        profile=profile_of(),
        measured={"rollout_to_train_end_s": 30.0, "waiting_ratio": 0.5},
    )
    return Case(**(defaults | fields))


def test_compare_gives_the_largest_error_over_times():
    truth = simulate(case_of().config, case_of().profile, num_updates=4).round_mean("rollout_to_train_end_s")
    right = case_of(measured={"rollout_to_train_end_s": truth})
    slow = case_of(measured={"rollout_to_train_end_s": truth * 1.25, "first_dispatch_s": 1e-3})
    assert cases.max_relative_error(cases.errors([right])) == pytest.approx(0.0)
    # A dispatch's error doesn't count.
    assert cases.max_relative_error(cases.errors([right, slow])) == pytest.approx(0.2)
    assert cases.max_relative_error([]) is None


def test_skipped_updates_of_a_run_are_not_predicted():
    whole = simulate(case_of().config, case_of().profile, num_updates=4)
    last = simulate(case_of().config, case_of().profile, num_updates=2, warmup_updates=2)
    assert last.seconds < whole.seconds
    (error,) = cases.errors([case_of(measured={"seconds": last.seconds}, num_skipped=2)])
    assert error.predicted == last.seconds


def test_closed_formulas_are_the_papers():
    closed = pipelinerl.closed()
    assert closed["r_gen"] == pytest.approx(16.9, rel=0.001)
    assert closed["r_train"] == pytest.approx(17.08)
    assert closed["r_conv"] == pytest.approx(10.7, rel=0.07)
    assert closed["speedup"] == pytest.approx(1.57, rel=0.07)
    assert closed["g_max"] in (132, 133)
