"""The safetensors format, read a slice and written a tensor at a time.

A file is 8 bytes of header length (little endian), a JSON header padded with spaces, and the tensors' bytes one
after the other (https://github.com/huggingface/safetensors, "Format"). The safetensors library reads a file
through a memory map, whose pages count as the process's memory, and writes it from memory all at once; here the
memory in use is the slice or tensor at hand.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100 * 1000**2
_PAGE_BYTES = 4096
"""A gap between two pieces shorter than this is read along: the kernel fetches whole pages."""
_SCRATCH_BYTES = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What a tensor is, apart from its bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of one or two dims in an open file."""

    spec: Spec
    what: str
    """File and name, for messages."""
    descriptor: int
    offset: int

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """The slice (step 1 along each dim); no other bytes are read, but for gaps under a page.

        Raises:
          ValueError: the file is shorter than it was when it was opened.
        """
        width = self.spec.shape[-1]
        bounds = [s.indices(d)[:2] for s, d in zip(index, self.spec.shape, strict=True)]
        (top, bottom), (left, right) = bounds if len(bounds) == 2 else [(0, 1), *bounds]
        out = np.empty((bottom - top, right - left), self.spec.dtype)
        row_bytes, size = width * self.spec.dtype.itemsize, self.spec.dtype.itemsize
        start = self.offset + top * row_bytes
        if right - left == width:
            self._read_into(out, start)
        elif (width - (right - left)) * size >= _PAGE_BYTES:
            for i in range(len(out)):
                self._read_into(out[i], start + i * row_bytes + left * size)
        else:
            step = max(_SCRATCH_BYTES // row_bytes, 1)
            for i in range(0, len(out), step):
                scratch = np.empty((min(step, len(out) - i), width), self.spec.dtype)
                self._read_into(scratch, start + i * row_bytes)
                out[i : i + step] = scratch[:, left:right]
        return out if len(self.spec.shape) == 2 else out[0]

    def _read_into(self, out: np.ndarray, offset: int) -> None:
        view = out.view(np.uint8).reshape(-1).data
        while view:
            count = os.preadv(self.descriptor, [view], offset)
            if count == 0:
                raise ValueError(f"{self.what}: the file ends before the tensor does")
            view, offset = view[count:], offset + count


def open_tensors(path: pathlib.Path, descriptor: int) -> dict[str, StoredTensor]:
    """The tensors of a file; `descriptor` is the open file, and stays the caller's to close.

    Raises:
      ValueError: not a whole safetensors file, or a tensor of a type or number of dims that no model here has.
    """
    broken = f"{path} is not a whole safetensors file"
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"{broken}: {size} bytes, with a header of {length}")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        header.pop("__metadata__", None)
        ends = [8 + length + entry["data_offsets"][1] for entry in header.values()]
        tensors = {name: _stored(path, name, entry, descriptor, 8 + length) for name, entry in header.items()}
    except (KeyError, IndexError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{broken}: {error!r}") from error
    if max(ends, default=8 + length) != size:
        raise ValueError(f"{broken}: {size} bytes, wanted {max(ends, default=8 + length)}")
    return tensors


def _stored(path: pathlib.Path, name: str, entry: Mapping[str, Any], descriptor: int, data: int) -> StoredTensor:
    what, (start, end) = f"{path}: {name}", entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{what}: got dtype {entry['dtype']}, wanted one of {list(DTYPES)}")
    spec = Spec(dtype=DTYPES[entry["dtype"]], shape=tuple(entry["shape"]))
    if len(spec.shape) not in (1, 2):
        raise ValueError(f"{what}: got shape {list(spec.shape)}, wanted one or two dims")
    if end - start != spec.num_bytes:
        raise ValueError(f"{what}: got {end - start} bytes, wanted {spec.num_bytes} for {spec}")
    return StoredTensor(spec=spec, what=what, descriptor=descriptor, offset=data + start)


def in_file_order(names: Iterable[str]) -> list[str]:
    """The order in which the safetensors library stores tensors of one type."""
    return sorted(names)


def write(path: pathlib.Path, specs: Mapping[str, Spec], arrays: Iterator[np.ndarray]) -> None:
    """Writes a file, and flushes it to the disk.

    Args:
      path: must not exist.
      specs: the tensors, by name, in the order in which they are stored.
      arrays: their values in that order; each is written before the next is asked for.

    Raises:
      ValueError: an array isn't what its spec says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in specs.items():
        end = offset + spec.num_bytes
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, spec), array in zip(specs.items(), arrays, strict=True):
            if (array.dtype, array.shape) != (spec.dtype, spec.shape):
                raise ValueError(f"{name}: got {array.dtype} {array.shape}, wanted {spec}")
            file.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
        file.flush()
        os.fsync(file.fileno())
