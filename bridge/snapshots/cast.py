"""One pass from the learner's dtype to the served one, straight into the snapshot, on all idle cores."""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from bridge.snapshots.chunks import each_on_all_cores

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_PIECE_BYTES = 4 * 2**20
"""Of the target: what one core casts at a time, so that a large embedding keeps none of the others idle."""


def cast_all_into(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """`cast_into` for many (target, source), shared out among the cores that this process may use.

    Raises:
      ValueError: shapes of a pair differ.
    """
    pieces = [piece for pair in pairs for piece in _pieces(*pair)]
    each_on_all_cores(lambda i: cast_into(*pieces[i]), range(len(pieces)))


def cast_into(target: np.ndarray, source: np.ndarray) -> None:
    """Writes `source` into `target` of the same shape, rounding to nearest even like `astype`.

    float32 to bfloat16 is one loop of machine code, at twice the speed of ml_dtypes' and without Python's lock. A NaN
    stays one.

    Raises:
      ValueError: the shapes differ.
    """
    if target.shape != source.shape:
        raise ValueError(f"cannot cast shape {source.shape} into {target.shape}")
    fast = target.dtype == _BFLOAT16 and source.dtype == np.float32
    if fast and target.flags.c_contiguous and source.flags.c_contiguous:
        _rounding()(source.reshape(-1).view(np.uint32), target.reshape(-1).view(np.uint16))
    else:
        np.copyto(target, source, casting="unsafe")


def _pieces(target: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if target.shape != source.shape or not (target.flags.c_contiguous and source.flags.c_contiguous):
        yield target, source
        return
    to, from_ = target.reshape(-1), source.reshape(-1)
    step = max(1, _PIECE_BYTES // target.itemsize)
    for start in range(0, to.size, step):
        yield to[start : start + step], from_[start : start + step]


@functools.cache
def _rounding() -> Callable[[np.ndarray, np.ndarray], None]:
    """The upper halves of float32 bits, rounded to nearest even; compiled once, in a fraction of a second.

    The rounded half is that of x + 0x7fff + (bit 16 of x). A NaN's bits must not be rounded, they could carry over into
    an ordinary number: it keeps its upper half, and a bit that keeps it a NaN.
    """
    numba: Any = importlib.import_module("numba")  # comes with the learner's extra; who casts nothing needs none
    uint32 = np.uint32
    half, low_bit, shift = uint32(0x7FFF), uint32(1), uint32(16)
    magnitude, infinity, quiet = uint32(0x7FFFFFFF), uint32(0x7F800000), uint32(0x40)

    def round_to_upper_halves(bits: np.ndarray, halves: np.ndarray) -> None:
        for i in range(bits.size):
            x = bits[i]
            upper = x >> shift
            rounded = (x + half + (upper & low_bit)) >> shift
            halves[i] = upper | quiet if x & magnitude > infinity else rounded

    of = numba.types.Array
    types = (of(numba.uint32, 1, "C", readonly=True), of(numba.uint16, 1, "C"))
    return numba.njit([types], nogil=True)(round_to_upper_halves)
