import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner.model.attention.dispatch import attention
from learner.model.attention.xla import _plan
from tests.learner.model.attention.attention_cases import assert_close, example, oracle, seen


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("part", [slice(0, 144), slice(48, 96)], ids=["whole-row", "middle-third"])
def test_plan_meets_exactly_the_blocks_between_the_first_seen_and_the_last(part, window):
    block, segments = 16, example(9, length=144)[3]
    blocks = _plan(jnp.asarray(segments[:, part]), jnp.asarray(segments), part.start, window, block)
    mask = seen(segments, window)[:, part].reshape(2, -1, block, 144)
    for t, (b, i) in enumerate(np.ndindex(2, mask.shape[1])):
        keys = np.flatnonzero(mask[b, i].any(0))
        begin, end = int(blocks.begin[t]) - b * 9, int(blocks.end[t]) - b * 9
        if keys.size:
            assert (begin, end) == (keys[0] // block, keys[-1] // block + 1)
        else:
            assert begin >= end


def test_long_row_compiles_without_a_square_array():
    length, heads = 32768, 2
    shape = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, segments):
        return attention(q, k, v, segments, scale=0.1, path="xla").sum()

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(shape, shape, shape, ids).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    # One float32 [S, S] is 4.3 GB, one float32 [H, block, S] at 512 tokens 134 MB; q and its like are 17 MB each.
    assert memory.temp_size_in_bytes < 10 * shape.size * 4


def test_work_follows_the_segments_and_not_the_row():
    """Counts key blocks: 32 segments of a 2048-token row meet at most 2 of 64 tokens for each query block."""
    segments = np.repeat(np.arange(1, 33), 64)[None].astype(np.int32)
    blocks = _plan(jnp.asarray(segments), jnp.asarray(segments), 0, None, 64)
    assert np.asarray(blocks.end - blocks.begin).tolist() == [1] * 32
    whole = np.ones_like(segments)
    blocks = _plan(jnp.asarray(whole), jnp.asarray(whole), 0, None, 64)
    assert np.asarray(blocks.end - blocks.begin).tolist() == list(range(1, 33))


def with_prefixes(segments):
    """Each segment but the first of a row sees the first one too, where nothing lies between it and the next."""
    prefixes = np.zeros_like(segments)
    for row, out in zip(segments, prefixes, strict=True):
        row[: np.nonzero(row)[0][0]] = 0
        row[row > 0] -= row[row > 0].min() - 1
        real = np.nonzero(row)[0]
        row[real[0] : real[-1] + 1] = np.maximum.accumulate(row[real[0] : real[-1] + 1])  # no padding between
        out[row > 1] = 1
        out[row > 4] = 5  # a second family
        out[row == 5] = 0
    return prefixes


@pytest.mark.heavy
@pytest.mark.parametrize("block", [16, 64])
def test_segments_behind_a_prefix_equal_each_alone_behind_it(block):
    q, k, v, segments, d_out = example(4)
    prefixes = with_prefixes(segments)
    ids = jnp.asarray(segments)
    assert segments.max() > 6

    def run(q, k, v):
        return attention(q, k, v, ids, scale=0.4, path="xla", block=block, prefix_ids=jnp.asarray(prefixes))

    out, pull = jax.vjp(run, q, k, v)
    got = (out, *pull(d_out))
    want = [np.zeros(x.shape) for x in (q, q, k, v)]
    for b, segment in ((row, s) for row in range(2) for s in range(1, segments[row].max() + 1)):
        (prefix,) = set(prefixes[b][segments[b] == segment].tolist())
        own = segments[b] == segment
        where = np.nonzero(own | ((segments[b] == prefix) & (prefix != 0)))[0]
        query, key, value = (x[b : b + 1, where] for x in (q, k, v))
        # Its own queries alone: the prefix's count with the prefix.
        alone = oracle(
            query,
            key,
            value,
            np.ones((1, where.size), np.int32),
            np.where(own[where][None, :, None, None], d_out[b, where][None], 0),
        )
        want[0][b, own] = alone[0][0, own[where]]
        for total, part in zip(want[1:], alone[1:], strict=True):
            total[b, where] += part[0]
    for g, w, name in zip(got, want, ("out", "dq", "dk", "dv"), strict=True):
        assert_close(g, w, np.float32, name)
