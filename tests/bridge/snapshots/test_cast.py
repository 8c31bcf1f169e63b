import ml_dtypes
import numpy as np
import pytest

from bridge.snapshots.shared_memory import cast_all_into

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def bits(a: np.ndarray) -> np.ndarray:
    return a.view(np.uint16)


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
    cast_all_into([(target, source)])
    np.testing.assert_array_equal(target.astype(np.float64), source.astype(np.float64))


def test_cast_into_a_strided_target_writes_the_target():
    whole = np.zeros((4, 6), BFLOAT16)
    cast_all_into([(whole[:, 1:4], np.full((4, 3), 2.0, np.float32))])
    assert whole.astype(np.float32).sum() == 24


def test_cast_shape_mismatch_refused():
    with pytest.raises(ValueError, match="shape"):
        cast_all_into([(np.zeros((1, 3), BFLOAT16), np.zeros(3, np.float32))])


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
    cast_all_into([(target, source)])
    np.testing.assert_array_equal(target.astype(np.float32), source)
