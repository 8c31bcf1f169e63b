import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from launch.tools.report.run_data import bins, downsample, running_mean, spread_out

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


@given(VALUES, st.integers(1, 30))
def test_running_mean_and_its_error_are_those_of_the_neighbours(values, width):
    array = np.array(values)
    mean, error = running_mean(array, width)
    for i in range(array.size):
        near = array[max(0, i - width // 2) : min(array.size, i + (width + 1) // 2)]
        near = near[np.isfinite(near)]
        if near.size == 0:
            assert np.isnan(mean[i])
            continue
        np.testing.assert_allclose(mean[i], near.mean(), rtol=1e-6, atol=1e-4)
        if near.size < 3:
            assert np.isnan(error[i])
        else:
            np.testing.assert_allclose(error[i], near.std(ddof=1) / np.sqrt(near.size), rtol=1e-3, atol=1.0)


def test_standard_error_of_a_known_series():
    _, error = running_mean(np.array([0.0, 1.0, 0.0, 1.0]), 100)
    np.testing.assert_allclose(error, np.sqrt(1 / 3) / 2)  # variance 1/3 of four, over sqrt(4)


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(0, 1500))
def test_what_is_spread_out_fits_and_has_both_ends(sizes, budget):
    got = spread_out(sizes, budget=budget)
    assert got == sorted(set(got)) and sum(sizes[i] for i in got) <= budget
    if sum(sizes) <= budget:
        assert got == list(range(len(sizes)))
    elif len(got) > 1:
        assert got[0] == 0 and got[-1] == len(sizes) - 1
        assert np.diff(got).max() - np.diff(got).min() <= 1
