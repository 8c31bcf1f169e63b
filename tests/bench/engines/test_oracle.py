"""The oracle by hand, and against the planner's simulated engines."""

import dataclasses

import pytest

from launch.tools.plan.profile import EngineProfile
from tests.bench.engines.oracle import Work, batches_s, rollouts_s, trainings_s

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


TAIL = Work(
    lengths=[(2, 9), (8, 8), (1, 9), (3, 9), (4, 4), (1, 4)],
    is_flat=[False] * 6,
    num_groups=2,
    num_samples=1,
    by_sample=False,
    profile=EngineProfile(running=(1.0, 9.0), tokens_per_s=(1.0, 9.0), max_num_seqs=9),
    num_engines=1,
    prompt_tokens=[10, 10, 10, 10, 10, 10],
)
"""Two of three prompts, and the first of two requests: each runs at a token a second, however many others do."""


def test_tail_batching_puts_off_what_is_left_and_then_runs_it_alone():
    # 0 and 2 are complete at 2, 3 and 5 (1 and 3 tokens) at 3; 1 and 4 are put off, and as a round take 8.
    rounds_s = trainings_s(TAIL, num_started=3, seconds_per_token=0.0, is_streamed=False, num_rounds=3)
    assert rounds_s == pytest.approx([2.0, 3.0, 8.0])


def test_prompt_without_variance_that_was_put_off_is_made_up_for_in_the_long_round():
    # As above, but 1 has no variance, which is known when its 8 tokens are done; another one follows with 1 token.
    flat = [n == 1 for n in range(7)]
    work = dataclasses.replace(TAIL, lengths=[*TAIL.lengths, (1, 4)], is_flat=flat, prompt_tokens=[10] * 7)
    rounds_s = trainings_s(work, num_started=3, seconds_per_token=0.0, is_streamed=False, num_rounds=3)
    assert rounds_s == pytest.approx([2.0, 3.0, 9.0])


def test_training_follows_the_rollout_or_begins_with_the_first_group():
    cost = 0.125
    # Tokens: 2 and 1; 3 and 1; 8 and 4; and ten of each prompt.
    serial = trainings_s(TAIL, num_started=3, seconds_per_token=cost, is_streamed=False, num_rounds=3)
    assert serial == pytest.approx([2 + 23 * cost, 3 + 24 * cost, 8 + 32 * cost])
    # The shorter one at 1 s, then the other; in the long round 4 is done with 14 tokens by 5.75, before 1 is there.
    streamed = trainings_s(TAIL, num_started=3, seconds_per_token=cost, is_streamed=True, num_rounds=3)
    assert streamed == pytest.approx([1 + 23 * cost, max(1 + 11 * cost, 3) + 13 * cost, 8 + 18 * cost])


def test_without_more_groups_than_are_wanted_nothing_is_put_off():
    work = dataclasses.replace(TAIL, lengths=[m[:1] for m in TAIL.lengths])
    rounds_s = trainings_s(work, num_started=2, seconds_per_token=0.0, is_streamed=False, num_rounds=3)
    assert rounds_s == rollouts_s(work, num_rounds=3) == pytest.approx([8.0, 3.0, 4.0])


def test_what_has_no_place_waits():
    one_place = EngineProfile(running=(1.0,), tokens_per_s=(1.0,), max_num_seqs=1)
    work = dataclasses.replace(WORK, profile=one_place, by_sample=True, num_engines=1)
    assert rollouts_s(work, num_rounds=1) == pytest.approx([10.0])
