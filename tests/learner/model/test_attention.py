import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.model.attention import PATHS, attention

# (path, block): every registered path, whole and with queries in blocks.
VARIANTS = [(path, block) for path in PATHS for block in (1024, 4, 3)]


def oracle(q, k, v, segments, positions, scale):
    """Float64 loops, written apart from the code."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = [
            j
            for j in range(q.shape[1])
            if segments[b, i] != 0 and segments[b, j] == segments[b, i] and positions[b, j] <= positions[b, i]
        ]
        if seen:
            scores = np.array([q[b, i, h] @ k[b, j, h // group] * scale for j in seen])
            weights = np.exp(scores - scores.max())
            out[b, i, h] = (weights / weights.sum()) @ v[b, seen, h // group]
    return out


def example(seed, length=10, heads=4, kv_heads=2, head_dim=6) -> Any:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(2, length, n, head_dim)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    segments = np.zeros((2, length), np.int32)
    positions = np.zeros((2, length), np.int32)
    for b in range(2):
        start, segment = int(rng.integers(0, 2)), 1
        while start < length - 1:
            end = min(length - 1 + b, start + int(rng.integers(1, 6)))
            segments[b, start:end], positions[b, start:end] = segment, np.arange(end - start)
            start, segment = end, segment + 1
    return q, k, v, segments, positions


@pytest.mark.parametrize("path,block", VARIANTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_against_float64_loops_agrees(path, block, kv_heads):
    q, k, v, segments, positions = example(kv_heads, kv_heads=kv_heads)
    got = attention(q, k, v, segments, positions, scale=0.4, path=path, block=block)
    np.testing.assert_allclose(got, oracle(q, k, v, segments, positions, 0.4), atol=2e-6)


@pytest.mark.parametrize("path,block", VARIANTS)
def test_attention_gradient_equals_autodiff_of_dense_softmax(path, block):
    q, k, v, segments, positions = example(7)
    d_out = np.random.default_rng(8).normal(size=q.shape).astype(np.float32)

    def dense(q, k, v):
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        mask = (segments[:, :, None] == segments[:, None]) & (positions[:, :, None] >= positions[:, None])
        mask = (mask & (segments != 0)[:, :, None])[:, None]
        scores = jnp.where(mask, jnp.einsum("bihd,bjhd->bhij", q, k) * 0.4, -1e9)
        weights = jax.nn.softmax(scores, -1) * mask
        return (jnp.einsum("bhij,bjhd->bihd", weights, v) * d_out).sum()

    def ours(q, k, v):
        return (attention(q, k, v, segments, positions, scale=0.4, path=path, block=block) * d_out).sum()

    for got, want in zip(jax.grad(ours, (0, 1, 2))(q, k, v), jax.grad(dense, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("path,block", VARIANTS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_padding_is_zero_and_its_gradient_finite(path, block, dtype):
    q, k, v, segments, positions = example(3)
    segments[1] = 0
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    # Scores far out of exp's range, and padding with huge values that must not be touched.
    q, k = q * 300, jnp.where((segments == 0)[..., None, None], 1e30, k)

    def total(q, k, v):
        return attention(q, k, v, segments, positions, scale=1.0, path=path, block=block).sum()

    out = np.asarray(attention(q, k, v, segments, positions, scale=1.0, path=path, block=block), np.float32)
    assert np.isfinite(out).all() and not out[segments == 0].any()
    for grad in jax.grad(total, (0, 1, 2))(q, k, v):
        grad = np.asarray(grad, np.float32)
        assert grad.dtype == np.float32 and np.isfinite(grad).all() and not grad[segments == 0].any()


@functools.partial(jax.jit, static_argnames=("path", "block"))
def compiled(*args, path, block):
    return attention(*args, scale=0.4, path=path, block=block)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), b=st.integers(0, 1), j=st.integers(0, 9))
def test_attention_token_not_seen_moves_nothing(seed, b, j):
    q, k, v, segments, positions = example(seed)
    k2, v2 = k.copy(), v.copy()
    k2[b, j] += 1.0
    v2[b, j] += 1.0
    sees = (segments[b] == segments[b, j]) & (segments[b, j] != 0) & (positions[b] >= positions[b, j])
    for path, block in VARIANTS:
        before = np.asarray(compiled(q, k, v, segments, positions, path=path, block=block))
        after = np.asarray(compiled(q, k2, v2, segments, positions, path=path, block=block))
        moved = (before != after).any((-1, -2))
        np.testing.assert_array_equal(moved[b], sees)
        assert not moved[1 - b].any()


@pytest.mark.parametrize("path,block", [v for v in VARIANTS if v[1] == 4])
def test_attention_long_row_makes_no_square_array(path, block):
    q, k, v, segments, positions = example(0, length=64)

    def total(q, k, v):
        return attention(q, k, v, segments, positions, scale=0.4, path=path, block=block).sum()

    text = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, v).as_text()
    assert "x4x64xf32" in text and "x64x64x" not in text


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(path="splash"), "attention path: got 'splash'"),
        (dict(block=0), "block must be >= 1"),
        (dict(k=np.zeros((2, 10, 3, 6), np.float32)), "attention shapes"),
        (dict(positions=np.zeros((2, 9), np.int32)), "wanted"),
    ],
)
def test_attention_bad_argument_is_refused(change, message):
    names = ("q", "k", "v", "segment_ids", "positions")
    with pytest.raises(ValueError, match=message):
        attention(**(dict(zip(names, example(0), strict=True)) | dict(scale=1.0) | change))
