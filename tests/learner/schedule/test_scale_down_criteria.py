"""RollPacker's scaling down (section 4.4): when it is tried, and whether what runs would fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.schedule.scale_down_criteria import ScaleDown, num_fitting, peak_kv_tokens, would_fit


def test_scaling_down_is_tried_from_a_fifth_to_a_half_at_every_twentieth():
    progress = ScaleDown(num_requests=100)
    assert [n for n in range(1, 101) if progress.is_due()] == [20, 25, 30, 35, 40, 45, 50]
    progress = ScaleDown(num_requests=100)
    tried = []
    for n in range(1, 101):
        if progress.is_due():
            tried.append(n)
            progress.is_done = n == 30
    assert tried == [20, 25, 30]


def test_projected_peak_is_held_against_nine_tenths_of_the_cache():
    alike = np.array([[10, 90]] * 5, np.int32)  # 100 tokens at their end
    assert would_fit(alike, 9, 1000) and not would_fit(alike, 10, 1000)
    assert would_fit(alike, 10**6, 0)


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


def test_peak_of_equal_lengths_is_their_end_and_a_long_tail_is_longer_than_its_mean():
    assert peak_kv_tokens(np.array([[5, 100]] * 7, np.int32)) == 105
    tail = np.array([[0, 10]] * 9 + [[0, 1000]], np.int32)
    assert peak_kv_tokens(tail) == pytest.approx((9 * 10 * 5 + 1000 * 500) / 1090)
    with pytest.raises(ValueError, match="at least one length"):
        peak_kv_tokens(np.zeros((0, 2), np.int32))


def test_fitting_counts_whole_sequences():
    short = np.array([[4, 10]] * 8, np.int32)  # 14 tokens at their end
    assert num_fitting(short, 14 * 7) == 7 and num_fitting(short, 14 * 7 - 1) == 6 and num_fitting(short, -5.0) == 0
