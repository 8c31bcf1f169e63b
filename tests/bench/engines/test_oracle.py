"""The oracle by hand, and against the planner's simulated engines."""

import dataclasses

import pytest

from launch.plan.engine_profile import EngineProfile
from tests.bench.engines.oracle import Work, batches_s, rollouts_s

ALONE = EngineProfile(running=(1.0, 4.0), tokens_per_s=(1.0, 1.0), max_num_seqs=4)
"""A token a second, however many run: two share it."""
WORK = Work(
    lengths=[(4, 4), (1, 1), (1, 1), (2, 2)],
    is_flat=[False] * 4,
    num_groups=2,
    num_samples=2,
    by_sample=False,
    profile=ALONE,
    num_engines=2,
)


def test_group_runs_on_one_engine_and_its_samples_on_two():
    assert rollouts_s(WORK, num_rounds=2) == pytest.approx([8.0, 4.0])
    # 4 and 1 on each engine: until 2 s both share, then 3 tokens are left of the long ones.
    assert rollouts_s(dataclasses.replace(WORK, by_sample=True), num_rounds=1) == pytest.approx([5.0])


def test_flat_group_is_made_up_for_when_it_ends_and_in_a_batch_when_all_have():
    work = dataclasses.replace(WORK, is_flat=[False, True, False, False])
    assert rollouts_s(work, num_rounds=1) == pytest.approx([8.0])  # 1 and 2 beside 0
    assert batches_s(work, num_rounds=1) == pytest.approx([10.0])
    assert batches_s(WORK, num_rounds=2) == pytest.approx([8.0, 4.0])


def test_race_ends_with_the_samples_that_are_wanted():
    work = dataclasses.replace(WORK, num_samples=1, lengths=[(9, 1), (9, 1)], by_sample=False)
    assert rollouts_s(work, num_rounds=1) == pytest.approx([2.0])


def test_what_has_no_place_waits():
    one_place = EngineProfile(running=(1.0,), tokens_per_s=(1.0,), max_num_seqs=1)
    work = dataclasses.replace(WORK, profile=one_place, by_sample=True, num_engines=1)
    assert rollouts_s(work, num_rounds=1) == pytest.approx([10.0])
