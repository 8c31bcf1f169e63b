"""The parallelism planner: RollPacker's rules on known sequences of steps, and what holds for any."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.elastic import (
    ElasticBounds,
    ElasticDecision,
    ElasticPolicy,
    StepStats,
    kv_tokens_at,
    num_fitting,
    peak_kv_tokens,
    played_out_peak,
)
from actor.engine_protocol import EngineSize

SHORT = np.array([[4, 10]] * 8, np.int32)  # 14 tokens at their end
NONE = np.zeros((0, 2), np.int32)


def share(*, tp: int = 2, max_tp: int = 8, min_tp: int = 1, now: int = 64, kv_tokens: int = 10_000) -> ElasticPolicy:
    return ElasticPolicy(
        size=EngineSize(max_num_seqs=64, tensor_parallel_size=tp, kv_tokens=kv_tokens, weights_kv_tokens=2000),
        bounds=ElasticBounds(
            min_sequences=4, max_sequences=64, min_tensor_parallel_size=min_tp, max_tensor_parallel_size=max_tp
        ),
        max_sequences=now,
        tensor_parallel_size=tp,
    )


def step(num_preempted: int = 0, *, usage: float = 0.5, is_full: bool = True, lengths=SHORT, **fields) -> StepStats:
    return StepStats(num_preempted=num_preempted, kv_usage_peak=usage, is_full=is_full, lengths=lengths, **fields)


def sizes(planner: ElasticPolicy, *preemptions: int, lengths=SHORT) -> list[int]:
    return [planner.observe(step(n, lengths=lengths)).tensor_parallel_size for n in preemptions]


def test_size_doubles_when_preemptions_rise_by_more_than_a_twentieth():
    assert sizes(share(), 100_000, 105_000) == [2, 2]
    assert sizes(share(), 100_000, 105_001) == [2, 4]


def test_rise_of_few_preemptions_is_chance_up_to_four_deviations_of_the_difference():
    assert sizes(share(), 0, 1) == sizes(share(), 0, 16) == [2, 2]
    assert sizes(share(), 0, 17) == [2, 4]
    assert sizes(share(), 100, 164) == [2, 2]  # sqrt(264) is 16.2
    assert sizes(share(), 100, 166) == [2, 4]


@pytest.mark.parametrize("rate", [0.5, 2, 20, 100, 1000])
def test_steady_rate_of_preemptions_never_grows_the_engine_and_twice_the_rate_does(rate):
    rng, planner = np.random.default_rng(0), share(tp=1)
    num_finished = rng.integers(500, 1500, 400)
    for of in num_finished:
        one = step(int(rng.poisson(rate * of / 1000)), num_finished=int(of))
        assert planner.observe(one).tensor_parallel_size == 1
    if rate < 100:
        return  # too few to tell from chance in a single step
    for of, times in ((1000, 1), (1000, 2)):
        found = planner.observe(step(int(rng.poisson(times * rate * of / 1000)), num_finished=of))
    assert found.tensor_parallel_size == 2


def test_first_step_and_the_one_after_a_change_compare_with_nothing():
    assert sizes(share(), 100, 200, 500, 700, 10_000) == [2, 4, 4, 8, 8]  # 8 is the bound


def test_long_rounds_are_held_against_long_ones_and_short_against_short():
    planner = share(tp=1)
    period = [(True, 1000)] * 4 + [(False, 600)]
    steady = [planner.observe(step(n, is_race=race)).tensor_parallel_size for race, n in period * 3]
    assert steady == [1] * 15
    assert planner.observe(step(800, is_race=False)).tensor_parallel_size == 2  # fewer than a short round's 1000


def test_preemptions_are_counted_by_response():
    planner = share(tp=1)
    shares = [(1000, 2000), (1500, 3000), (500, 1000), (1040, 2000), (1300, 2000)]
    got = [planner.observe(step(n, num_finished=of)).tensor_parallel_size for n, of in shares]
    assert got == [1, 1, 1, 1, 2]  # 0.65 a response after 0.52


def test_size_halves_after_four_quiet_steps_in_a_row_and_not_below_the_bound():
    assert sizes(share(tp=4), 0, 0, 0, 0, 0, 0, 0, 0, 0) == [4, 4, 4, 2, 2, 2, 2, 1, 1]
    assert sizes(share(tp=4, min_tp=2), *[0] * 8) == [4, 4, 4, 2, 2, 2, 2, 2]
    assert sizes(share(), 9, 0, 0, 0, 30, 0, 0, 0, 0) == [2, 2, 2, 2, 4, 4, 4, 4, 2]


def test_size_is_not_halved_if_the_projected_peak_would_not_fit():
    # 12,000 tokens with the weights; half of it without them is 4000. 64 sequences of 70 tokens want 4480.
    long = np.array([[10, 60]] * 4, np.int32)
    assert kv_tokens_at(share().size, 1) == 4000
    assert sizes(share(), *[0] * 6, lengths=long) == [2] * 6
    assert sizes(share(), *[0] * 6, lengths=NONE) == [2] * 6


def test_size_that_is_no_power_of_two_of_the_other_is_never_taken():
    assert sizes(share(tp=3, max_tp=4), 1, 2, *[0] * 9) == [3] * 11


@pytest.mark.parametrize("by_round", [True, False])
def test_responses_that_grow_slowly_grow_the_engine_before_they_preempt(by_round):
    """64 at once, equally long: 10,000 tokens of cache hold 156 each, and at 140 nine tenths are full."""
    planner = share(tp=1, kv_tokens=10_000)
    planner.by_round = by_round
    got = {}
    for length in range(100, 150, 2):
        lengths = np.array([[10, length - 10]] * 64, np.int32)
        got[length] = planner.observe(step(0, num_finished=64, lengths=lengths)).tensor_parallel_size
        if got[length] > 1:
            break
    assert got.pop(length) == 2 and set(got.values()) == {1}
    assert length == 142


def test_a_growing_engine_keeps_its_sequences_and_one_at_its_bound_cuts_them_only_if_all_are_preempted():
    long = np.array([[0, 450]] * 64, np.int32)  # 10,000 tokens hold 22
    growing, bound = share(tp=1, max_tp=8), share(tp=1, max_tp=1)
    crowded = step(40, num_finished=64, lengths=long)
    assert growing.observe(crowded) == ElasticDecision(max_sequences=64, tensor_parallel_size=2)
    assert bound.observe(crowded) == ElasticDecision(max_sequences=64, tensor_parallel_size=1)
    thrashing = step(64, num_finished=64, lengths=long)
    assert bound.observe(thrashing) == ElasticDecision(max_sequences=32, tensor_parallel_size=1)


def test_preemptions_lower_the_sequences_and_quiet_full_steps_raise_them():
    planner = share(max_tp=2)
    got = [planner.observe(step(5)).max_sequences for _ in range(3)]
    assert got == [51, 40, 32]
    got = [planner.observe(step(0)).max_sequences for _ in range(4)]
    assert got == [40, 50, 63, 64]
    planner = share(now=32)
    assert planner.observe(step(0, usage=0.85)).max_sequences == 32
    assert planner.observe(step(0, is_full=False)).max_sequences == 32


def test_sequences_follow_the_projection_but_fall_by_half_at_most():
    long = np.array([[0, 450]] * 4, np.int32)  # 9000 of 10,000 tokens hold 20
    planner = share(max_tp=2)
    assert [planner.observe(step(5, lengths=long)).max_sequences for _ in range(3)] == [32, 20, 16]
    assert planner.observe(step(0, lengths=long)).max_sequences == 20
    assert planner.observe(step(0, lengths=long)).max_sequences == 20  # no higher than what fits


@given(
    steps=st.lists(
        st.builds(
            step,
            st.integers(0, 50),
            usage=st.floats(0, 1),
            is_full=st.booleans(),
            lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 900)), max_size=6).map(
                lambda x: np.array(x, np.int32).reshape(-1, 2)
            ),
        ),
        max_size=40,
    ),
    tp=st.sampled_from([1, 2, 4]),
    now=st.integers(4, 64),
)
def test_any_history_stays_within_the_bounds_and_changes_for_a_reason(steps, tp, now):
    planner = share(tp=tp, now=now, max_tp=4)
    last_tp, last_n, since = tp, now, 0
    for one in steps:
        got = planner.observe(one)
        assert 4 <= got.max_sequences <= 64 and got.tensor_parallel_size in (1, 2, 4)
        if got.max_sequences < last_n:
            assert one.num_preempted > 0
        if got.max_sequences > last_n:
            assert one.num_preempted == 0 and one.is_full
        grows = got.tensor_parallel_size > last_tp
        assert not grows or got.max_sequences == last_n  # the larger engine makes the room
        if one.num_preempted and last_n > 4 and not grows:
            assert got.max_sequences < last_n
        since += 1
        if got.tensor_parallel_size > last_tp:
            assert got.tensor_parallel_size == 2 * last_tp and one.num_preempted > 0 and since >= 2  # each step fits
        if got.tensor_parallel_size < last_tp:
            assert 2 * got.tensor_parallel_size == last_tp and one.num_preempted == 0 and since >= 4
        if got.tensor_parallel_size != last_tp:
            since = 0
        last_tp, last_n = got.tensor_parallel_size, got.max_sequences


LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=8).map(
    lambda x: np.array(x, np.int32)
)


@given(lengths=LENGTHS)
def test_peak_is_that_of_sequences_played_out_token_by_token(lengths):
    together = max(sum(p + t for p, r in lengths.tolist() if r >= t) for t in range(41)) / len(lengths)
    held, places = 0.0, 0  # one place that serves them all, one after the other, looked at in the middle of each token
    for prompt, response in lengths.tolist():
        for t in range(response):
            held += prompt + t + 0.5
            places += 1
    assert peak_kv_tokens(lengths) == pytest.approx(max(together, held / places))


@given(lengths=LENGTHS, num_requests=st.integers(1, 20), places=st.integers(1, 6))
def test_played_out_peak_is_that_of_a_brute_force_token_by_token(lengths, num_requests, places):
    waiting = [tuple(lengths[i % len(lengths)]) for i in range(num_requests)]
    running: list[list[int]] = []
    peak = 0
    while waiting or running:
        while waiting and len(running) < places:
            prompt, response = waiting.pop(0)
            running.append([int(prompt), int(response)])
        for one in running:  # each decodes a token
            one[0], one[1] = one[0] + 1, one[1] - 1
        peak = max(peak, sum(held for held, _ in running))
        running = [one for one in running if one[1] > 0]
    assert played_out_peak(lengths, num_requests=num_requests, places=places) == peak


def test_peak_of_equal_lengths_is_their_end_and_a_long_tail_is_longer_than_its_mean():
    assert peak_kv_tokens(np.array([[5, 100]] * 7, np.int32)) == 105
    tail = np.array([[0, 10]] * 9 + [[0, 1000]], np.int32)
    assert peak_kv_tokens(tail) == pytest.approx((9 * 10 * 5 + 1000 * 500) / 1090)
    with pytest.raises(ValueError, match="at least one length"):
        peak_kv_tokens(NONE)


def test_fitting_counts_whole_sequences():
    assert num_fitting(SHORT, 14 * 7) == 7 and num_fitting(SHORT, 14 * 7 - 1) == 6 and num_fitting(SHORT, -5.0) == 0


def test_bounds_refuse_what_has_nothing_between_them():
    with pytest.raises(ValueError, match="sequences, got 9 and 8"):
        ElasticBounds(min_sequences=9, max_sequences=8, max_tensor_parallel_size=1)
    with pytest.raises(ValueError, match="max_tensor_parallel_size, got 1 and 0"):
        ElasticBounds(min_sequences=1, max_sequences=8, max_tensor_parallel_size=0)
