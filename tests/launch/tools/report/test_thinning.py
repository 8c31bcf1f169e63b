import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from launch.tools.report.run_data import bins, downsample, spread_out

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=200)


@given(VALUES, st.integers(1, 50))
def test_bins_hold_every_row_once_and_are_at_most_so_many(values, most):
    array = np.array(values)
    starts = bins(array.size, most)
    assert starts.size <= most and starts[0] == 0
    chunks = np.split(array, starts[1:])
    with np.errstate(all="ignore"):
        mean = [np.nanmean(c) if np.isfinite(c).any() else np.nan for c in chunks]
        largest = [np.nanmax(c) if np.isfinite(c).any() else np.nan for c in chunks]
    np.testing.assert_allclose(downsample(array, starts), np.array(mean), rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(downsample(array, starts, largest=True), largest)


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(0, 1500))
def test_what_is_spread_out_fits_and_has_both_ends(sizes, budget):
    got = spread_out(sizes, budget=budget)
    assert got == sorted(set(got)) and sum(sizes[i] for i in got) <= budget
    if sum(sizes) <= budget:
        assert got == list(range(len(sizes)))
    elif len(got) > 1:
        assert got[0] == 0 and got[-1] == len(sizes) - 1
        assert np.diff(got).max() - np.diff(got).min() <= 1
