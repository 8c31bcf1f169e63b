"""Arrays into a snapshot's slot, on all idle cores."""

from collections.abc import Iterable, Iterator

import numpy as np

from bridge.snapshots.chunks import each_on_all_cores

_PIECE_BYTES = 4 * 2**20
"""Bytes of the target that one core writes at a time, so that a large embedding keeps no other core idle."""


def cast_all_into(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Writes each source into its target of the same shape, rounding to nearest even like `astype`.

    Raises:
      ValueError: shapes of a pair differ.
    """
    pieces = [piece for pair in pairs for piece in _pieces(*pair)]
    each_on_all_cores(lambda i: np.copyto(*pieces[i], casting="unsafe"), range(len(pieces)))


def _pieces(target: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if target.shape != source.shape:
        raise ValueError(f"cannot cast shape {source.shape} into {target.shape}")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        yield target, source
        return
    to, from_ = target.reshape(-1), source.reshape(-1)
    if to.dtype == from_.dtype:  # a copy of bytes, whatever numpy knows of the dtype
        to, from_ = to.view(np.uint8), from_.view(np.uint8)
    step = max(1, _PIECE_BYTES // to.itemsize)
    for start in range(0, to.size, step):
        yield to[start : start + step], from_[start : start + step]
