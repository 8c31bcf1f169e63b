"""One pass from the learner's dtype to the served one, straight into the snapshot, on all idle cores."""

from collections.abc import Iterable, Iterator

import ml_dtypes
import numpy as np

from bridge.snapshots.chunks import each_on_all_cores
from bridge.snapshots.rounding import round_to_bfloat16

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

    float32 to bfloat16 is one loop of machine code (`rounding`), without Python's lock. A NaN stays one.

    Raises:
      ValueError: the shapes differ.
    """
    if target.shape != source.shape:
        raise ValueError(f"cannot cast shape {source.shape} into {target.shape}")
    fast = target.dtype == _BFLOAT16 and source.dtype == np.float32
    if fast and target.flags.c_contiguous and source.flags.c_contiguous:
        round_to_bfloat16(source.reshape(-1).view(np.uint32), target.reshape(-1).view(np.uint16))
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
