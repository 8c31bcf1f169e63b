"""Tensor offsets, and the map from one process's shard to the whole file.

A shard contains its blocks' rectangles, tensor after tensor, each at an aligned offset. A rectangle of full rows is one
contiguous run in the whole file. A rectangle of some columns is one run per row. The only shard of a single host is the
whole file.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np

from bridge.snapshots.shared_memory import ALIGN_BYTES
from bridge.weight_types import Block, TensorEntry

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def aligned(position: int) -> int:
    """Returns the first aligned tensor offset at or after `position`, in bytes."""
    return -(-position // ALIGN_BYTES) * ALIGN_BYTES


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns [rows, cols] of a tensor: the last dim is columns, and all others are rows. A vector is one row."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def lay_out(entries: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Places tensors consecutively at aligned offsets; returns them and the total size in bytes.

    Raises ValueError if a dtype is not supported, or the total size is 0.
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
    """Returns a tensor as a view of the data file's bytes, in its dtype and shape."""
    raw = data[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def zero_gaps(whole: np.ndarray, tensors: Sequence[TensorEntry]) -> None:
    """Zeroes the gaps between tensors. A shard contains a gap only if it has both neighbors."""
    for before, after in zip(tensors, tensors[1:], strict=False):
        end = before.offset_bytes + before.num_bytes
        if after.offset_bytes > end:
            whole[end : after.offset_bytes] = 0


MAX_BLOCKS_OF_A_TENSOR = 4096
_MAX_PAIRS = 2**30
"""Most pairs of blocks that are compared, which takes a few seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class StridedRows:
    """Rows of bytes that are contiguous in a shard and `stride` bytes apart in the whole file."""

    start: int
    """Offset of the first row in the shard."""
    whole: int
    """Offset of the first row in the whole file."""
    num_rows: int
    row_bytes: int
    stride: int

    @property
    def end(self) -> int:
        """Offset after the last row in the shard."""
        return self.start + self.num_rows * self.row_bytes


def check_tiling(tensors: Sequence[TensorEntry], blocks: Sequence[Block]) -> None:
    """Checks that the blocks of all shards cover every value of every tensor exactly once.

    Raises ValueError if not, or if a block exceeds its tensors or mixes kinds of tensors, or there are too many blocks.
    """
    ends = _ends_of_kinds(tensors)
    for block in blocks:
        _check_block(tensors, ends, block)
    starting = sorted(blocks, key=lambda b: b.first_tensor)
    cuts = sorted({0, len(tensors), *(b.first_tensor for b in blocks), *(_end(b) for b in blocks)})
    active: list[Block] = []
    num_pairs = next_block = 0
    for cut, next_cut in zip(cuts, cuts[1:], strict=False):
        active = [b for b in active if _end(b) > cut]
        while next_block < len(starting) and starting[next_block].first_tensor == cut:
            active.append(starting[next_block])
            next_block += 1
        num_pairs += len(active) ** 2
        if len(active) > MAX_BLOCKS_OF_A_TENSOR or num_pairs > _MAX_PAIRS:
            raise ValueError(
                f"tensor {tensors[cut].name}: expected at most {MAX_BLOCKS_OF_A_TENSOR} blocks, got {len(active)}"
            )
        if not active:
            missing = next((t for t in tensors[cut:next_cut] if t.num_bytes), None)
            if missing is not None:
                raise ValueError(f"no piece has tensor {missing.name}")
            continue
        _check_rectangles(tensors[cut], active)


class ShardMap:
    """Map between the bytes of a shard and of the whole file."""

    def __init__(self, tensors: Sequence[TensorEntry], blocks: Sequence[Block]) -> None:
        """Computes the runs; blocks must lie within their tensors (`check_tiling`)."""
        self.starts: list[tuple[int, ...]] = []
        """Offset of each tensor's rectangle in the shard, per block."""
        self._runs: list[StridedRows] = []
        self._gaps: list[tuple[int, int]] = []
        end = 0
        last: int | None = None
        """Tensor whose end the last run reaches; None if the run ends within a tensor."""
        for block in blocks:
            starts: list[int] = []
            for index in range(block.first_tensor, _end(block)):
                if aligned(end) > end:
                    self._gaps.append((end, aligned(end)))
                run, is_first, is_last = _run_of(tensors[index], block, aligned(end))
                starts.append(run.start)
                end = run.end
                if not (is_first and last == index - 1 and self._extend(run)):
                    self._runs.append(run)
                last = index if is_last else None
            self.starts.append(tuple(starts))
        self.num_bytes = end
        self._run_starts = [run.start for run in self._runs]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yields the byte ranges of the shard between tensors, which are zero."""
        yield from self._gaps

    def contiguous(self, start: int, end: int) -> int | None:
        """Returns the offset in the whole file of bytes `start` to `end`; None if they are not in one row."""
        run = self._runs[max(0, bisect.bisect_right(self._run_starts, start) - 1)]
        is_one = run.num_rows == 1 and run.start <= start and end <= run.end
        return run.whole + start - run.start if is_one else None

    def room(self, whole: np.ndarray, start: int, end: int) -> np.ndarray:
        """Returns memory for bytes `start` to `end`: a view of `whole` if they are contiguous, otherwise a buffer."""
        at = self.contiguous(start, end)
        return np.empty(end - start, np.uint8) if at is None else whole[at : at + end - start]

    def put(self, piece: np.ndarray, start: int, whole: np.ndarray) -> None:
        """Moves bytes of the shard, from `start` on, to the whole file unless `room` returned a view of it."""
        # A part of a larger buffer may lie in one row even if the whole buffer does not.
        if not np.may_share_memory(piece, whole):
            self.scatter(piece, start, whole)

    def gather(self, whole: np.ndarray, start: int, end: int) -> np.ndarray:
        """Returns the shard's bytes `start` to `end` from the whole file; a view if they are in one row."""
        if (at := self.contiguous(start, end)) is not None:
            return whole[at : at + end - start]
        piece = np.zeros(end - start, np.uint8)
        for part, (lie, stride) in self._parts(start, end):
            _copy(_rows(whole, lie, part.shape_in(stride)), part.of(piece))
        return piece

    def scatter(self, piece: np.ndarray, start: int, whole: np.ndarray) -> None:
        """Writes bytes of the shard, from `start` on, into the whole file; drops the zeros in gaps."""
        for part, (lie, stride) in self._parts(start, start + piece.size):
            _copy(part.of(piece), _rows(whole, lie, part.shape_in(stride)))

    def _extend(self, run: StridedRows) -> bool:
        """Extends the last run by an adjacent one; returns False if they are not adjacent."""
        before = self._runs[-1]
        if before.num_rows != 1 or run.num_rows != 1 or run.whole - before.whole != run.start - before.start:
            return False
        length = run.end - before.start
        self._runs[-1] = StridedRows(before.start, before.whole, 1, length, length)
        return True

    def _parts(self, start: int, end: int) -> "Iterator[tuple[_Part, tuple[int, int]]]":
        """Yields the rows of bytes between two offsets of the shard, with their offset and stride in the whole file."""
        for i in range(max(0, bisect.bisect_right(self._run_starts, start) - 1), len(self._runs)):
            run = self._runs[i]
            position, last = max(start, run.start), min(end, run.end)
            if run.start >= end:
                return
            while position < last:
                row, column = divmod(position - run.start, run.row_bytes)
                num_rows = (last - position) // run.row_bytes if column == 0 else 0
                num_bytes = run.row_bytes if num_rows else min(run.row_bytes - column, last - position)
                part = _Part(position - start, max(1, num_rows), num_bytes)
                yield part, (run.whole + row * run.stride + column, run.stride)
                position += part.num_rows * part.row_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    start: int
    num_rows: int
    row_bytes: int

    def of(self, piece: np.ndarray) -> np.ndarray:
        return piece[self.start : self.start + self.num_rows * self.row_bytes].reshape(self.num_rows, self.row_bytes)

    def shape_in(self, stride: int) -> tuple[int, int, int]:
        return self.num_rows, self.row_bytes, stride


def _rows(whole: np.ndarray, start: int, shape: tuple[int, int, int]) -> np.ndarray:
    num_rows, row_bytes, stride = shape
    extent = whole[start : start + (num_rows - 1) * stride + row_bytes]
    if extent.size != (num_rows - 1) * stride + row_bytes:
        raise ValueError(f"{num_rows} rows from byte {start} exceed the {whole.size} bytes")
    return np.lib.stride_tricks.as_strided(extent, (num_rows, row_bytes), (stride, 1), writeable=whole.flags.writeable)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    np.copyto(target, source)


def _run_of(tensor: TensorEntry, block: Block, start: int) -> tuple[StridedRows, bool, bool]:
    """Returns the run of a block in one tensor, and if it starts at the tensor's first byte and ends at its last."""
    rows, cols = matrix_shape(tensor.shape)
    item = DTYPES[tensor.dtype].itemsize
    whole = tensor.offset_bytes + (block.first_row * cols + block.first_col) * item
    num_rows, row_bytes = block.num_rows, block.num_cols * item
    if block.num_cols == cols:
        num_rows, row_bytes = 1, num_rows * row_bytes
    run = StridedRows(start, whole, num_rows, row_bytes, cols * item if num_rows > 1 else row_bytes)
    ends_last = block.first_row + block.num_rows == rows and block.first_col + block.num_cols == cols
    return run, whole == tensor.offset_bytes, ends_last


def _kind(tensor: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _end(block: Block) -> int:
    return block.first_tensor + block.num_tensors


def _ends_of_kinds(tensors: Sequence[TensorEntry]) -> list[int]:
    """Returns for each tensor the end of the following tensors with its dtype and shape."""
    ends = [0] * len(tensors)
    end = len(tensors)
    for i in range(len(tensors) - 1, -1, -1):
        if i + 1 < len(tensors) and _kind(tensors[i]) != _kind(tensors[i + 1]):
            end = i + 1
        ends[i] = end
    return ends


def _check_block(tensors: Sequence[TensorEntry], ends: Sequence[int], block: Block) -> None:
    if _end(block) > len(tensors) or _end(block) > ends[block.first_tensor]:
        raise ValueError(f"block: its tensors must exist and have one shape and dtype, got {block}")
    tensor = tensors[block.first_tensor]
    rows, cols = matrix_shape(tensor.shape)
    if block.first_row + block.num_rows > rows or block.first_col + block.num_cols > cols:
        raise ValueError(f"block exceeds tensor {tensor.name} of shape {tensor.shape}: {block}")


def _check_rectangles(tensor: TensorEntry, blocks: Sequence[Block]) -> None:
    table = np.array([(b.first_row, b.first_col, b.num_rows, b.num_cols) for b in blocks], np.int64)
    low, high = table[:, :2], table[:, :2] + table[:, 2:]
    meet = np.ones((len(blocks), len(blocks)), np.bool_)
    for dim in range(2):
        meet &= (low[:, None, dim] < high[None, :, dim]) & (low[None, :, dim] < high[:, None, dim])
    if meet.sum() != len(blocks):  # each meets itself
        raise ValueError(f"two pieces have the same part of tensor {tensor.name}")
    if sum(b.num_rows * b.num_cols for b in blocks) != math.prod(tensor.shape):
        raise ValueError(f"no piece has a part of tensor {tensor.name}")
