import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as npst

from bridge.snapshots.cast import cast_all_into, cast_into

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def bits(a: np.ndarray) -> np.ndarray:
    return a.view(np.uint16)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(bits(got)[~nan], bits(want)[~nan])


@settings(deadline=None)
@given(npst.arrays(np.uint32, npst.array_shapes(max_dims=3, max_side=8), elements=st.integers(0, 2**32 - 1)))
def test_cast_float32_to_bfloat16_matches_ml_dtypes_for_any_bits(pattern):
    source = pattern.view(np.float32)
    target = np.zeros(source.shape, BFLOAT16)
    cast_into(target, source)
    with np.errstate(invalid="ignore"):
        want = source.astype(BFLOAT16)
    assert_same(target, want)


def test_cast_every_rounding_case_in_one_array():
    # Every upper half with lower halves around the tie: exhaustive over what decides the rounding.
    upper = np.arange(2**16, dtype=np.uint32) << 16
    source = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)] + [upper[:5]]).view(
        np.float32
    )
    target = np.zeros(source.shape, BFLOAT16)
    cast_into(target, source)
    with np.errstate(invalid="ignore"):
        assert_same(target, source.astype(BFLOAT16))


def test_cast_nan_with_a_low_payload_stays_nan():
    source = np.full(70_000, 1.0, np.float32)
    source[69_999] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
    target = np.zeros(source.shape, BFLOAT16)
    cast_into(target, source)
    assert np.isnan(target[69_999]) and np.all(target[:69_999] == 1)


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (np.arange(12, dtype=np.float32).reshape(3, 4).T, BFLOAT16),  # not contiguous
        (np.arange(12, dtype=np.float64).reshape(4, 3), BFLOAT16),
        (np.arange(12, dtype=np.float32).reshape(4, 3), np.dtype(np.float16)),
        (np.arange(12).reshape(4, 3).astype(BFLOAT16), np.dtype(np.float32)),
    ],
)
def test_cast_other_layouts_and_dtypes_by_value(source, dtype):
    target = np.zeros((4, 3), dtype)
    cast_into(target, source)
    np.testing.assert_array_equal(target.astype(np.float64), source.astype(np.float64))


def test_cast_into_a_strided_target_writes_the_target():
    whole = np.zeros((4, 6), BFLOAT16)
    cast_into(whole[:, 1:4], np.full((4, 3), 2.0, np.float32))
    assert whole.astype(np.float32).sum() == 24


def test_cast_shape_mismatch_refused():
    with pytest.raises(ValueError, match="shape"):
        cast_into(np.zeros((1, 3), BFLOAT16), np.zeros(3, np.float32))


def test_cast_all_of_large_small_strided_and_empty_arrays_at_once():
    random = np.random.default_rng(0)
    sources = [
        random.standard_normal((3, 2_000_003), dtype=np.float32),  # cut into pieces, the last one short
        random.standard_normal((8, 6), dtype=np.float32).T,
        np.zeros((0, 4), np.float32),
        np.float32(1.5).reshape(()),
    ]
    targets = [np.zeros(source.shape, BFLOAT16) for source in sources]
    cast_all_into(zip(targets, sources, strict=True))
    for target, source in zip(targets, sources, strict=True):
        np.testing.assert_array_equal(bits(target), bits(source.astype(BFLOAT16)))
    with pytest.raises(ValueError, match="shape"):
        cast_all_into([(targets[0], sources[0]), (targets[0], sources[1])])


def test_cast_of_a_source_that_must_not_be_written():
    source = np.arange(5, dtype=np.float32)
    source.flags.writeable = False
    target = np.zeros(5, BFLOAT16)
    cast_into(target, source)
    np.testing.assert_array_equal(target.astype(np.float32), source)


@pytest.mark.parametrize("shift", [0, 1, 5, 31, 32, 33])
def test_cast_of_any_length_to_any_place_writes_that_and_no_more(shift):
    bits = np.random.default_rng(shift).integers(0, 2**32, 1000, np.uint32)
    bits[::7] = 0x7F800001  # NaNs
    for size in (0, 1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 700):
        source = bits[shift : shift + size].view(np.float32)
        whole = np.full(1000, 7, np.uint16)
        cast_into(whole[shift : shift + size].view(BFLOAT16), source)
        assert (whole[:shift] == 7).all() and (whole[shift + size :] == 7).all()
        with np.errstate(invalid="ignore"):
            assert_same(whole[shift : shift + size].view(BFLOAT16), source.astype(BFLOAT16))
