"""Tensor offsets; where the bytes of one process's shard lie in the whole file.

A piece is its blocks' rectangles, tensor after tensor, each at an aligned offset. A rectangle of whole rows is one run
of bytes in the whole file; one of some columns is a run a row. The one piece of a single host is one run, all of it.
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


MAX_BLOCKS_OF_A_TENSOR = 4096
_MAX_PAIRS = 2**30
"""Pairs of blocks that are held against each other, at most: a few seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class StridedRows:
    """Rows of bytes that follow on one another in a piece, and lie `stride` apart in the whole file."""

    start: int
    """Where it begins in the piece."""
    whole: int
    """Where its first row begins in the whole file."""
    num_rows: int
    row_bytes: int
    stride: int

    @property
    def end(self) -> int:
        """Where it ends in the piece."""
        return self.start + self.num_rows * self.row_bytes


def full_blocks(tensors: Sequence[TensorEntry]) -> tuple[Block, ...]:
    """All of every tensor that isn't empty: what a single host writes."""
    blocks: list[Block] = []
    first = 0
    for i in range(1, len(tensors) + 1):
        if i < len(tensors) and _kind(tensors[i]) == _kind(tensors[first]):
            continue
        rows, cols = matrix_shape(tensors[first].shape)
        if rows * cols:
            blocks.append(
                Block(first_tensor=first, num_tensors=i - first, first_row=0, num_rows=rows, first_col=0, num_cols=cols)
            )
        first = i
    return tuple(blocks)


def check_tiling(tensors: Sequence[TensorEntry], blocks: Sequence[Block]) -> None:
    """Whether the blocks hold every value of every tensor, and none twice.

    Args:
      tensors: of the whole file.
      blocks: of all pieces together.

    Raises:
      ValueError: a block lies outside its tensors or covers unlike ones; a value is in none, or in two; or there are
        more blocks than can be looked through.
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
                f"tensor {tensors[cut].name} lies in {len(active)} blocks, the limit is {MAX_BLOCKS_OF_A_TENSOR}"
            )
        if not active:
            missing = next((t for t in tensors[cut:next_cut] if t.num_bytes), None)
            if missing is not None:
                raise ValueError(f"no piece has tensor {missing.name}")
            continue
        _check_rectangles(tensors[cut], active)


class ShardMap:
    """The map between the bytes of a piece and those of the whole file."""

    def __init__(self, tensors: Sequence[TensorEntry], blocks: Sequence[Block]) -> None:
        """Works out the runs; blocks must lie within their tensors (`check_tiling`)."""
        self.starts: list[tuple[int, ...]] = []
        """For each block, where each of its tensors' rectangles begins in the piece."""
        self._runs: list[StridedRows] = []
        self._gaps: list[tuple[int, int]] = []
        end = 0
        last: int | None = None
        """The tensor that the last run reaches the end of, whatever lies behind it; None if it ends within one."""
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
        """Of the piece's file."""
        self._run_starts = [run.start for run in self._runs]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Where the piece holds no tensor's bytes, but zeros."""
        yield from self._gaps

    def contiguous(self, start: int, end: int) -> int | None:
        """Where bytes `start` to `end` of the piece begin in the whole file; None if not in one row there."""
        run = self._runs[max(0, bisect.bisect_right(self._run_starts, start) - 1)]
        is_one = run.num_rows == 1 and run.start <= start and end <= run.end
        return run.whole + start - run.start if is_one else None

    def room(self, whole: np.ndarray, start: int, end: int) -> np.ndarray:
        """Where bytes `start` to `end` of the piece may be written: in their place, or, for `put`, beside it."""
        at = self.contiguous(start, end)
        return np.empty(end - start, np.uint8) if at is None else whole[at : at + end - start]

    def put(self, piece: np.ndarray, start: int, whole: np.ndarray) -> None:
        """Brings bytes of the piece, from `start` on, to their place, if they were not written there (`room`)."""
        # A part of a larger room may lie in one row where all of the room does not.
        if not np.may_share_memory(piece, whole):
            self.scatter(piece, start, whole)

    def gather(self, whole: np.ndarray, start: int, end: int) -> np.ndarray:
        """Bytes `start` to `end` of the piece, out of the whole file's; a view where they lie in one row."""
        if (at := self.contiguous(start, end)) is not None:
            return whole[at : at + end - start]
        piece = np.zeros(end - start, np.uint8)
        for part, (lie, stride) in self._parts(start, end):
            _copy(_rows(whole, lie, part.shape_in(stride)), part.of(piece))
        return piece

    def scatter(self, piece: np.ndarray, start: int, whole: np.ndarray) -> None:
        """Puts bytes of the piece, from `start` on, where they lie in the whole file; zeros between them go nowhere."""
        for part, (lie, stride) in self._parts(start, start + piece.size):
            _copy(part.of(piece), _rows(whole, lie, part.shape_in(stride)))

    def _extend(self, run: StridedRows) -> bool:
        """Makes the last run longer by one that follows it in the piece as in the whole file."""
        before = self._runs[-1]
        if before.num_rows != 1 or run.num_rows != 1 or run.whole - before.whole != run.start - before.start:
            return False
        length = run.end - before.start
        self._runs[-1] = StridedRows(before.start, before.whole, 1, length, length)
        return True

    def _parts(self, start: int, end: int) -> "Iterator[tuple[_Part, tuple[int, int]]]":
        """What lies between two bytes of the piece: rows of bytes, each beside its place in the whole file."""
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
    """Rows of bytes in an extract of a piece."""

    start: int
    num_rows: int
    row_bytes: int

    def of(self, piece: np.ndarray) -> np.ndarray:
        """`[rows, bytes]`."""
        return piece[self.start : self.start + self.num_rows * self.row_bytes].reshape(self.num_rows, self.row_bytes)

    def shape_in(self, stride: int) -> tuple[int, int, int]:
        return self.num_rows, self.row_bytes, stride


def _rows(whole: np.ndarray, start: int, shape: tuple[int, int, int]) -> np.ndarray:
    num_rows, row_bytes, stride = shape
    extent = whole[start : start + (num_rows - 1) * stride + row_bytes]
    if extent.size != (num_rows - 1) * stride + row_bytes:
        raise ValueError(f"{num_rows} rows from byte {start} on don't lie in {whole.size} bytes")
    return np.lib.stride_tricks.as_strided(extent, (num_rows, row_bytes), (stride, 1), writeable=whole.flags.writeable)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    np.copyto(target, source)


def _run_of(tensor: TensorEntry, block: Block, start: int) -> tuple[StridedRows, bool, bool]:
    """A block's rectangle of one tensor; whether it begins at the tensor's first byte, and ends at its last."""
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
    """For each tensor, the end of the like ones that follow it."""
    ends = [0] * len(tensors)
    end = len(tensors)
    for i in range(len(tensors) - 1, -1, -1):
        if i + 1 < len(tensors) and _kind(tensors[i]) != _kind(tensors[i + 1]):
            end = i + 1
        ends[i] = end
    return ends


def _check_block(tensors: Sequence[TensorEntry], ends: Sequence[int], block: Block) -> None:
    if _end(block) > len(tensors) or _end(block) > ends[block.first_tensor]:
        raise ValueError(f"a block covers tensors that there aren't, or that are unlike: {block}")
    tensor = tensors[block.first_tensor]
    rows, cols = matrix_shape(tensor.shape)
    if block.first_row + block.num_rows > rows or block.first_col + block.num_cols > cols:
        raise ValueError(f"a block leads out of tensor {tensor.name} of shape {tensor.shape}: {block}")


def _check_rectangles(tensor: TensorEntry, blocks: Sequence[Block]) -> None:
    """Whether the blocks' rectangles, all within a tensor, cover it, and none covers another."""
    table = np.array([(b.first_row, b.first_col, b.num_rows, b.num_cols) for b in blocks], np.int64)
    low, high = table[:, :2], table[:, :2] + table[:, 2:]
    meet = np.ones((len(blocks), len(blocks)), np.bool_)
    for dim in range(2):
        meet &= (low[:, None, dim] < high[None, :, dim]) & (low[None, :, dim] < high[:, None, dim])
    if meet.sum() != len(blocks):  # each meets itself
        raise ValueError(f"two pieces have the same part of tensor {tensor.name}")
    if sum(b.num_rows * b.num_cols for b in blocks) != math.prod(tensor.shape):
        raise ValueError(f"no piece has a part of tensor {tensor.name}")
