"""What the overlap bench makes of its sessions."""

import dataclasses
from typing import Any

import pytest

from tests.bench.overlap import rows as of_rows
from tests.bench.overlap.rows import Row
from tests.bench.overlap.setups import FEW_PLACES, FLAT, MANY_PLACES
from tests.bench.rig.rig import Result

SIZES = (32, 64, 96)


def result_of(total_s: list[float], *, wait: float, step_cpu_s: list[float], aside_s: float = 0.0) -> Result:
    """Rounds that wait this part of their time, but for `aside_s` of each, which is neither wait nor compute."""
    rounds: list[dict[str, Any]] = [
        {
            "round/rollout_to_train_end_s": seconds,
            "round/waiting_ratio": wait,
            "round/waiting_ratio_eq4": wait / 2,
            "round/wait_s": wait * (seconds - aside_s),
            "round/compute_s": (1 - wait) * (seconds - aside_s),
            "round/first_dispatch_s": 0.25,
        }
        for seconds in total_s
    ]
    return Result(
        rounds=rounds,
        steps=[],
        evals=[],
        events=[],
        num_passes=1,
        num_micro_batches=1,
        real_tokens=1,
        step_cpu_s=step_cpu_s,
        dropped={},
        running=[],
    )


def all_rows(**totals: list[float]) -> dict[tuple[str, str, int], Row]:
    """Every row the bench has; `totals` by engine and mode, as in cgp_few."""
    found = {}
    for setup in (FEW_PLACES, MANY_PLACES, FLAT):
        for mode in setup.modes:
            for groups in SIZES:
                total_s = totals.get(f"{mode}{setup.key}", [10.0, 12.0])
                one = result_of(total_s, wait=0.5 if mode == "serial" else 0.1, step_cpu_s=[1.0, 1.0, 2.0, 2.0])
                found[setup.name, mode, groups] = Row.of(setup, mode, groups, one)
    return found


def test_cpu_seconds_are_added_up_by_round():
    row = Row.of(FLAT, "cgp", 4, result_of([5.0, 6.0], wait=0.2, step_cpu_s=[1.0, 2.0, 4.0, 8.0]))
    assert row.compute_cpu_s == [3.0, 12.0]
    assert row.compute_s == pytest.approx([4.0, 4.8])


def test_time_set_aside_is_neither_wait_nor_compute():
    one = result_of([5.0, 6.0], wait=0.2, step_cpu_s=[1.0, 1.0], aside_s=1.0)
    row = Row.of(FLAT, "cgp", 4, one)
    assert row.compute_s == pytest.approx([3.2, 4.0]) and row.wait_s == pytest.approx([0.8, 1.0])


def test_compute_is_compared_by_cpu_time_whatever_the_clock_said():
    rows = all_rows(cgp_few=[10.0, 12.0], serial_few=[30.0, 50.0])  # compute_s differs by a third
    values = of_rows.values_of(rows, SIZES)
    assert values["compute_ratio"] == 1.0
    assert of_rows.aims_of(values, SIZES)["compute_ratio"]["met"]
    slow = rows[FEW_PLACES.name, "rolloutpipe", 64]
    rows[FEW_PLACES.name, "rolloutpipe", 64] = dataclasses.replace(slow, compute_cpu_s=[2.04, 4.08])
    values = of_rows.values_of(rows, SIZES)
    assert values["compute_ratio"] == values["compute_ratio_R64_rolloutpipe"] == pytest.approx(1.02)
    assert not of_rows.aims_of(values, SIZES)["compute_ratio"]["met"]  # the paper's differ by 1.5% at most
