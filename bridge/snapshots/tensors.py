"""Tensors in a snapshot's whole file: which dtypes there are, where each tensor lies, how it is seen without a copy."""

import math
from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np

from bridge.published import TensorEntry
from bridge.snapshots.segment import ALIGN_BYTES

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def aligned(position: int) -> int:
    """The first place for a tensor from there on, in bytes."""
    return -(-position // ALIGN_BYTES) * ALIGN_BYTES


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """[rows, cols] of a tensor: the last dim has the columns, all others are rows; a vector is one row."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def lay_out(entries: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Places tensors one after another at aligned offsets; returns them and the total in bytes.

    Raises:
      ValueError: a dtype that is not served, or no bytes at all.
    """
    tensors: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in entries:
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype!r}, served are {sorted(DTYPES)}")
        offset = aligned(end)
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        tensors.append(
            TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset_bytes=offset, num_bytes=num_bytes)
        )
        end = offset + num_bytes
    if end == 0:
        raise ValueError("a snapshot needs at least one tensor that is not empty")
    return tuple(tensors), end


def view(data: np.ndarray, tensor: TensorEntry) -> np.ndarray:
    """A tensor's part of the data file's bytes, in its dtype and shape; no copy."""
    raw = data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def zero_gaps(whole: np.ndarray, tensors: Sequence[TensorEntry]) -> None:
    """Writes the zeros between tensors, which lie in no host's piece unless it has both neighbours."""
    for before, after in zip(tensors, tensors[1:], strict=False):
        end = before.offset_bytes + before.num_bytes
        if after.offset_bytes > end:
            whole[end : after.offset_bytes] = 0
