"""Which pairs of blocks splash computes, against a brute force over pairs of tokens; what is skipped is not touched."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.model.attention.splash import fetched, skip_blocks, splash_kernel
from tests.learner.model.attention.attention_cases import SPLASH_BLOCKS, assert_close, example, oracle

LENGTH, BLOCK = 768, 128
WINDOWS = (None, 100, 300)

PIECE = st.tuples(st.integers(1, 400), st.sampled_from([0, 0, 1, 200]))
"""Tokens of a segment, and of padding before it."""
ROWS = st.lists(st.lists(PIECE, max_size=8), min_size=1, max_size=3)


@jax.jit
def tables(kernel, query_segments, key_segments) -> Any:
    """(forward, dq, dkv)"""
    return skip_blocks(kernel, query_segments, key_segments).tree_flatten()[0]


def packed(rows) -> np.ndarray:
    segments = np.zeros((len(rows), LENGTH), np.int32)
    for row, pieces in zip(segments, rows, strict=True):
        end = 0
        for number, (size, padding) in enumerate(pieces, 1):
            row[end + padding : end + padding + size] = number
            end += padding + size
    return segments


def sees(segments: np.ndarray, window: int | None) -> np.ndarray:
    """[S, S] of one row: query i sees key j."""
    i, j = np.arange(len(segments))[:, None], np.arange(len(segments))
    mask = (segments[:, None] == segments) & (segments != 0) & (i >= j)
    return mask if window is None else mask & (i - j < window)


def pairs(segments, window, block_q, block_kv, queries: slice) -> set[tuple[int, int]]:
    """Pairs of blocks with a query that sees a key in one of the rows at least; queries are a part of each row."""
    found = set()
    for row in segments:
        mask = sees(row, window)[queries]
        tiles = mask.reshape(len(mask) // block_q, block_q, LENGTH // block_kv, block_kv).any((1, 3))
        found |= {(t, u) for t, u in np.argwhere(tiles).tolist()}
    return found


def run_by_query(table) -> list[tuple[int, int]]:
    return [(t, int(table.data_next[0, t, w])) for t, w in np.argwhere(np.asarray(table.block_mask[0]))]


def run_by_key(table) -> list[tuple[int, int]]:
    return [(int(table.data_next[0, w, u]), u) for w, u in np.argwhere(np.asarray(table.block_mask[0]))]


def share(kernel, shard: int):
    """What `manual_sharding_spec` gives one of two devices that share a row."""

    def half(table):
        block, run = (np.split(np.asarray(x), 2, axis=1)[shard] for x in (table.data_next, table.block_mask))
        return table._replace(data_next=block, block_mask=run, q_sequence=np.split(table.q_sequence, 2)[shard])

    tables, kwargs = kernel.tree_flatten()
    return type(kernel).tree_unflatten(kwargs, [table and half(table) for table in tables])


@pytest.mark.heavy
@given(rows=ROWS, window=st.sampled_from(WINDOWS), shard=st.sampled_from([None, 0, 1]))
def test_tables_run_exactly_the_pairs_of_blocks_with_a_query_that_sees_a_key(rows, window, shard):
    segments = packed(rows)
    shards, queries = (1, slice(None)) if shard is None else (2, np.s_[shard * 384 : shard * 384 + 384])
    # Of a half row, 384 tokens, blocks are of 128 queries by 256 keys.
    kernel = splash_kernel(LENGTH, shards=shards, window=window, block=128 if shard is None else 256)
    sizes = kernel.kwargs["block_sizes"]
    kernel = kernel if shard is None else share(kernel, shard)
    fwd, dq, dkv = tables(kernel, segments[:, queries], segments)
    want = pairs(segments, window, sizes.block_q, sizes.block_kv, queries)
    for table, got in ((fwd, run_by_query), (dq, run_by_query), (dkv, run_by_key)):
        if table is not None:
            assert len(got(table)) == len(want) and set(got(table)) == want


@pytest.mark.heavy
@settings(max_examples=20)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_tables_of_ids_in_any_order_miss_no_pair(rows, seed):
    segments = packed(rows)
    names = np.random.default_rng(seed).permutation(np.arange(1, 99)).astype(np.int32)
    segments = np.where(segments == 0, 0, names[segments])
    fwd, _, dkv = tables(splash_kernel(LENGTH, block=BLOCK), segments, segments)
    want = pairs(segments, None, BLOCK, BLOCK, slice(None))
    assert want <= set(run_by_query(fwd)) and want <= set(run_by_key(dkv))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["forward", "dkv"])
def test_table_holds_the_next_block_that_runs_at_each_step(window, name):
    kernel = splash_kernel(LENGTH, window=window, block=BLOCK)
    segments = packed([[(200, 0), (100, 1), (100, 200)]])
    fwd, _, dkv = tables(kernel, segments, segments)
    table = fwd if name == "forward" else dkv
    run, block = (np.asarray(x[0]) for x in (table.block_mask, table.data_next))
    if name == "dkv":
        run, block = run.T, block.T
    steps = np.argwhere(run).tolist()
    assert steps and (run == 0).any()
    for step in np.ndindex(run.shape):
        following = next((s for s in steps if tuple(s) >= step), steps[0])
        assert block[step] == block[tuple(following)], step


def test_nothing_runs_in_rows_of_padding_and_every_block_named_exists():
    fwd, dq, dkv = tables(splash_kernel(LENGTH, block=BLOCK), *[np.zeros((2, LENGTH), np.int32)] * 2)
    for table in (fwd, dq, dkv):
        assert not np.asarray(table.block_mask).any() and not np.asarray(table.data_next).any()
    got = fetched(jnp.array([[False, False], [False, True], [False, False]]), jnp.array([[0, 1], [1, 2], [0, 2]]))
    assert got.tolist() == [[2, 2], [2, 2], [2, 2]]


@pytest.mark.heavy
def test_segments_of_a_block_each_run_one_pair_a_block_and_one_segment_runs_the_causal_half():
    kernel = splash_kernel(16384)
    for segments, count in ((np.repeat(np.arange(1, 17), 1024), 16), (np.ones(16384), 16 * 17 // 2)):
        row = segments[None].astype(np.int32)
        assert [int(t.block_mask.sum()) for t in tables(kernel, row, row)] == [count] * 3


@pytest.mark.heavy
@pytest.mark.parametrize("rows,length", [(2, 700), (1, 500)], ids=["three-passes", "fused-backward"])
@pytest.mark.parametrize("window", [None, 200])
def test_blocks_that_do_not_meet_are_never_computed(rows, length, window):
    """A block of NaN gives NaN to all that is computed with it, masked or not."""
    q, k, v, _, d_out = (x[:rows] for x in example(4, length=length, kv_heads=2))
    segments = np.repeat(np.arange(1, 9), 128)[None, :length].repeat(rows, 0).astype(np.int32)
    # Blocks 1 and 3 of 128 tokens are poisoned; a window or a segment that reached into others would show it.
    bad = np.isin(segments, (2, 4))
    want = oracle(q, k, v, segments, d_out, window=window)
    q, k, v = (np.where(bad[..., None, None], np.float32(np.nan), x) for x in (q, k, v))
    got = SPLASH_BLOCKS.with_gradients(q, k, v, segments, d_out, window=window)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert np.isnan(np.asarray(a)[bad]).all()
        assert_close(np.where(bad[..., None, None], 0, a), np.where(bad[..., None, None], 0, b), np.float32, name)


@pytest.mark.heavy
@pytest.mark.parametrize("window", [None, 150])
def test_one_row_with_a_fused_backward_equals_float64(window):
    q, k, v, segments, d_out = (x[:1] for x in example(6, length=500))
    assert splash_kernel(512, block=BLOCK).kwargs["block_sizes"].use_fused_bwd_kernel
    got = SPLASH_BLOCKS.with_gradients(q, k, v, segments, d_out, window=window)
    want = oracle(q, k, v, segments, d_out, window=window)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(a, b, np.float32, name)


@pytest.mark.heavy
def test_tables_of_a_long_row_are_made_without_a_square_array():
    length = 16384
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    memory = tables.lower(splash_kernel(length), row, row).compile().memory_analysis()
    assert memory is not None
    # The row is 64 KiB; one bool [S, S] would be 256 MiB.
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 16 * 4 * length
