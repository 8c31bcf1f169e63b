"""Packed rows, a float64 oracle of attention and its gradients, and the paths that must agree with it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from learner.model.attention.dispatch import attention

SCALE = 0.4


@dataclasses.dataclass(frozen=True)
class Variant:
    """A path and how a test runs it."""

    name: str
    options: tuple[tuple[str, Any], ...]
    float32: bool = True
    soft_caps: bool = False
    length: int = 150
    """Tokens of a row, several blocks where the path skips some."""

    def __call__(self, q, k, v, segments, *, window: int | None = None):
        return _compiled(q, k, v, segments, window=window, options=self.options)

    def with_gradients(self, q, k, v, segments, d_out, *, window: int | None = None, soft_cap: float | None = None):
        """(out, dq, dk, dv)."""
        options = (*self.options, ("soft_cap", soft_cap))
        return _compiled_gradients(q, k, v, segments, d_out, window=window, options=options)

    def skip_unless(self, *, dtype: Any) -> None:
        if dtype == np.float32 and not self.float32:
            pytest.skip(f"{self.name} takes no float32")


@functools.partial(jax.jit, static_argnames=("window", "options"))
def _compiled(q, k, v, segments, *, window, options):
    return attention(q, k, v, segments, scale=SCALE, window=window, **dict(options))


@functools.partial(jax.jit, static_argnames=("window", "options"))
def _compiled_gradients(q, k, v, segments, d_out, *, window, options):
    def f(q, k, v):
        return attention(q, k, v, segments, scale=SCALE, window=window, **dict(options))

    out, pull = jax.vjp(f, q, k, v)
    return out, *pull(d_out)


XLA = Variant("xla", (("path", "xla"),), soft_caps=True)
SPLASH = Variant("splash-interpreted", (("path", "splash"), ("interpret", True)), soft_caps=True)
SPLASH_BLOCKS = Variant(
    "splash-interpreted-6-blocks",
    (("path", "splash"), ("interpret", True), ("block", 128)),
    soft_caps=True,
    length=700,
)
VARIANTS = [
    XLA,
    Variant("xla-block-16", (("path", "xla"), ("block", 16)), soft_caps=True),
    SPLASH,
    pytest.param(SPLASH_BLOCKS, marks=pytest.mark.nightly),  # interpreted, so that one case takes ten seconds
    pytest.param(Variant("cudnn", (("path", "cudnn"),), float32=False), marks=pytest.mark.gpu),
]
every_path = pytest.mark.parametrize("run", VARIANTS, ids=lambda v: v.name)


def example(seed, *, length=150, heads=4, kv_heads=2, head_dim=24, dtype: Any = np.float32):
    """(q, k, v, segments, d_out): two rows of segments of 1 to 60 tokens, or a fifth of a row; padding around them."""
    rng = np.random.default_rng(seed)
    shapes = [(2, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d_out = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    segments = np.zeros((2, length), np.int32)
    for row in segments:
        start, number = int(rng.integers(0, 3)), 1
        while start < length - 5:
            end = min(length - int(rng.integers(0, 5)), start + int(rng.integers(1, max(60, length // 5))))
            row[start:end] = number
            # One padding token between some segments.
            start, number = end + int(rng.integers(0, 5) == 0), number + 1
    return q, k, v, segments, d_out


def seen(segments, window: int | None = None) -> np.ndarray:
    """[B, S, S]: whether query i sees key j, said in words of one pair."""
    batch, length = segments.shape
    mask = np.zeros((batch, length, length), bool)
    for b in range(batch):
        for i in range(length):
            for j in range(i + 1):
                near = window is None or i - j < window
                mask[b, i, j] = segments[b, i] != 0 and segments[b, i] == segments[b, j] and near
    return mask


def oracle(q, k, v, segments, d_out, *, window: int | None = None, soft_cap: float | None = None):
    """(out, dq, dk, dv) of dense attention in float64 NumPy, written apart from the code."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    mask, group = seen(segments, window), q.shape[2] // k.shape[2]
    out, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        query, key, value, d = q[b, :, h], k[b, :, h // group], v[b, :, h // group], d_out[b, :, h]
        scores, slope = query @ key.T * SCALE, 1.0
        if soft_cap is not None:
            slope = np.cosh(scores / soft_cap) ** -2.0
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = np.where(mask[b], scores, -np.inf)
        weights = np.exp(scores - np.where(mask[b].any(1), scores.max(1), 0.0)[:, None])
        weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
        d_weights = d @ value.T
        d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True)) * slope * SCALE
        out[b, :, h], dq[b, :, h] = weights @ value, d_scores @ key
        dk[b, :, h // group] += d_scores.T @ query
        dv[b, :, h // group] += weights.T @ d
    return out, dq, dk, dv


def assert_close(got, want, dtype, what=""):
    """Within float32's or bfloat16's rounding of the largest entry."""
    assert got.dtype == jnp.dtype(dtype), what
    tolerance = 2e-6 if dtype == np.float32 else 2e-2
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= tolerance * np.abs(want).max(), f"{what}: {error} of {np.abs(want).max()}"


BFLOAT16 = ml_dtypes.bfloat16
