"""The simulated steps, and the planner's rule against the paper's on them."""

import dataclasses

import numpy as np
import pytest

from tests.bench.parallelism.cases import DESIGN, FIGURE_12, HELD_OUT
from tests.bench.parallelism.simulation import Bare, Case, Fixed, Sluice, play, simulate_step

ROOMY = Case(name="roomy", kv_tokens=10**9, longest=(1000,) * 12)
NOISE = Case(
    name="noise", kv_tokens=100_000, longest=tuple(np.random.default_rng(0).integers(9_000, 16_000, 60).tolist())
)


@pytest.mark.parametrize("case", FIGURE_12, ids=lambda case: case.name)
def test_sluices_rule_is_faster_than_the_papers_and_than_a_fixed_size(case):
    ours, sizes = play(case, Sluice, 0)
    assert ours < play(case, Bare, 0)[0], sizes
    assert ours < play(case, lambda _: Fixed(1), 0)[0]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 8 or case.kv_tokens == 224_000


def test_size_stays_where_the_cache_holds_all():
    assert play(ROOMY, Sluice, 0)[1] == [1] * 12


def test_size_falls_with_the_lengths_and_grows_no_more():
    case = Case(name="falling", kv_tokens=150_000, longest=(*range(28_000, 2_000, -2_000), *[2_000] * 15), start=8)
    sizes = play(case, Sluice, 0)[1]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 8 and sizes[-1] == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("are_devices_fixed", [True, False])
def test_lengths_that_vary_by_chance_restart_the_engine_seldom(seed, are_devices_fixed):
    case = dataclasses.replace(NOISE, are_devices_fixed=are_devices_fixed)
    changes = {
        rule: sum(a != b for a, b in zip(sizes, sizes[1:], strict=False))
        for rule in (Sluice, Bare)
        for sizes in [play(case, rule, seed)[1]]
    }
    assert changes[Sluice] <= 5 and changes[Bare] >= 3 * changes[Sluice]


def test_step_ends_with_its_longest_response_where_nothing_limits_it():
    case = Case(name="one", kv_tokens=10**9, longest=(4000,), requests_per_device=1)
    tokens = int(case.responses(0, 1, 0)[0])
    step = simulate_step(case, 0, 1, 0)
    assert step.seconds == pytest.approx(512 * 6e-5 + tokens * 0.01725)
    assert step.num_preempted == 0 and step.kv_usage_peak == pytest.approx((512 + tokens) / 10**9)


def test_larger_engine_serves_the_requests_of_smaller_ones_and_more():
    one, two = (ROOMY.responses(0, size, 3) for size in (1, 2))
    assert len(one) == 100 and len(two) == 200 and (two[:100] == one).all()
    kept = dataclasses.replace(ROOMY, are_devices_fixed=False)
    assert (kept.responses(0, 8, 3) == one).all()
    assert ROOMY.size(2).kv_tokens == 2 * (10**9 + 142_000) - 142_000


def test_cases_have_names_of_their_own():
    names = [case.name for case in (*DESIGN, *HELD_OUT)]
    assert len(set(names)) == len(names)
