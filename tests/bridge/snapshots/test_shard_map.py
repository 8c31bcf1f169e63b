"""Pieces and the whole file: an oracle that names each value of the model by a number of its own."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.snapshots.shard_map import DTYPES, ShardMap, check_tiling, lay_out, zero_gaps
from bridge.weight_types import Block, TensorEntry
from tests.bridge.snapshots.whole import full_blocks

SHAPES = [(), (1,), (7,), (3, 5), (32, 16), (2, 3, 4), (40, 2)]


def block(first, num, rows, cols):
    (r0, r1), (c0, c1) = rows, cols
    return Block(first_tensor=first, num_tensors=num, first_row=r0, num_rows=r1 - r0, first_col=c0, num_cols=c1 - c0)


def filled(tensors: tuple[TensorEntry, ...], size: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The whole file of a model whose values are all different, and its tensors as matrices."""
    whole, matrices, next_value = np.zeros(size, np.uint8), [], 1
    for t in tensors:
        num = math.prod(t.shape)
        values = np.arange(next_value, next_value + num).astype(
            np.uint16 if DTYPES[t.dtype].itemsize == 2 else np.uint32
        )
        whole[t.offset_bytes : t.offset_bytes + t.num_bytes] = values.view(np.uint8)
        matrices.append(values.reshape(-1, t.shape[-1] if t.shape else 1))
        next_value += num
    return whole, matrices


def piece_of(blocks, matrices) -> np.ndarray:
    """What a host's file must hold: its rectangles one after another, each at a multiple of 64 bytes."""
    data = b""
    for b in blocks:
        for i in range(b.first_tensor, b.first_tensor + b.num_tensors):
            part = matrices[i][b.first_row : b.first_row + b.num_rows, b.first_col : b.first_col + b.num_cols]
            data += bytes(-len(data) % 64) + np.ascontiguousarray(part).tobytes()
    return np.frombuffer(data, np.uint8)


@st.composite
def models(draw):
    """Tensors in runs of like ones, and blocks that tile them: each run is cut into tensors, rows and columns."""
    entries, blocks, number = [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(["float32", "bfloat16"]))
        num = draw(st.integers(1, 3))
        entries += [(f"{number}.{len(entries)}.{i}", dtype, shape) for i in range(num)]
        rows, cols = math.prod(shape[:-1]), shape[-1] if shape else 1
        bounds = lambda n: sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))})  # noqa: E731
        for t0, t1 in zip(b := bounds(num), b[1:], strict=False):
            for r0, r1 in zip(b := bounds(rows), b[1:], strict=False):
                for c0, c1 in zip(b := bounds(cols), b[1:], strict=False):
                    blocks.append(block(number + t0, t1 - t0, (r0, r1), (c0, c1)))
        number += num
    return lay_out(entries), draw(st.permutations(blocks))


@pytest.mark.heavy
@given(model=models(), num_hosts=st.integers(1, 3), step=st.sampled_from([1, 5, 64, 100, 10_000]))
def test_pieces_of_hosts_in_any_split_make_up_the_whole_file(model, num_hosts, step):
    (tensors, size), blocks = model
    check_tiling(tensors, blocks)
    whole, matrices = filled(tensors, size)
    got = np.full(size, 255, np.uint8)
    zero_gaps(got, tensors)
    for host in range(num_hosts):
        own = blocks[host::num_hosts]
        placement, want = ShardMap(tensors, own), piece_of(own, matrices)
        assert placement.num_bytes == want.size
        for start in range(0, want.size, step):
            end = min(start + step, want.size)
            np.testing.assert_array_equal(placement.gather(whole, start, end), want[start:end])
        for start in range(0, want.size, 3 * step):  # received in longer rows than it is brought to its place in
            end = min(start + 3 * step, want.size)
            room = placement.room(got, start, end)
            room[:] = want[start:end]
            for at in range(start, end, step):
                placement.put(room[at - start : min(at + step, end) - start], at, got)
    np.testing.assert_array_equal(got, whole)


@given(model=models(), data=st.data())
def test_tiling_without_a_block_or_with_one_twice_or_moved_refused(model, data):
    (tensors, _), blocks = model
    victim = data.draw(st.sampled_from(blocks))
    rest = [b for b in blocks if b is not victim]
    with pytest.raises(ValueError, match="no piece has"):
        check_tiling(tensors, rest)
    with pytest.raises(ValueError, match="two pieces have"):
        check_tiling(tensors, [*blocks, victim])
    row = block(victim.first_tensor, 1, (0, 1), (0, 1))
    with pytest.raises(ValueError, match="two pieces have"):
        check_tiling(tensors, [*blocks, row])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (block(0, 3, (0, 4), (0, 8)), "one shape and dtype"),
        (block(2, 2, (0, 1), (0, 3)), "tensors must exist"),
        (block(9, 1, (0, 1), (0, 1)), "tensors must exist"),
        (block(0, 2, (0, 5), (0, 8)), "exceeds tensor a"),
        (block(0, 2, (3, 5), (0, 8)), "exceeds tensor a"),
        (block(0, 2, (0, 4), (1, 9)), "exceeds tensor a"),
        (block(0, 2, (2**62, 2**62 + 1), (0, 1)), "exceeds tensor a"),
    ],
)
def test_block_outside_its_tensors_or_over_unlike_ones_refused(wrong, said):
    tensors, _ = lay_out([("a", "float32", (4, 8)), ("b", "float32", (4, 8)), ("c", "float32", (3,))])
    check_tiling(tensors, [block(0, 2, (0, 4), (0, 8)), block(2, 1, (0, 1), (0, 3))])
    with pytest.raises(ValueError, match=said):
        check_tiling(tensors, [wrong])


def test_single_hosts_piece_is_the_whole_file_in_one_row():
    tensors, size = lay_out(
        [("a", "float32", (3,)), ("b", "bfloat16", (5, 3)), ("e", "float32", (0, 4)), ("c", "float32", ())]
    )
    blocks = full_blocks(tensors)
    check_tiling(tensors, blocks)
    placement = ShardMap(tensors[:2], full_blocks(tensors[:2]))
    assert placement.contiguous(0, placement.num_bytes) == 0
    whole = ShardMap(tensors, blocks)
    assert whole.num_bytes == size
    data = np.arange(size, dtype=np.uint8)
    zero_gaps(data, tensors)
    np.testing.assert_array_equal(whole.gather(data, 0, size), data)


def test_more_blocks_than_can_be_looked_through_refused():
    tensors, _ = lay_out([("a", "float32", (5000, 1))])
    with pytest.raises(ValueError, match="at most 4096 blocks"):
        check_tiling(tensors, [block(0, 1, (i, i + 1), (0, 1)) for i in range(5000)])
