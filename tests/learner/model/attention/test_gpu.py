"""What of the cuDNN path can be checked without a GPU; test_dispatch.py runs its numbers where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from learner.model.attention.dispatch import attention
from learner.model.attention.gpu import cudnn_attention, segment_layout
from tests.learner.model.attention.attention_cases import BFLOAT16, example

layout = jax.jit(segment_layout, static_argnums=1)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12), M=st.sampled_from([2, 5])
)
def test_segment_layout_is_the_start_and_length_of_each_segment(lengths, M):
    row, starts, sizes = np.zeros(128, np.int32), [], []
    place = 0
    for number, (size, gap) in enumerate(lengths):
        place += gap
        row[place : place + size] = number + 1
        starts.append(place)
        sizes.append(size)
        place += size
    other = np.zeros_like(row)
    got_starts, got_lengths, fits = layout(jnp.asarray([row, other]), M)
    assert fits.tolist() == [len(lengths) <= M, True]
    if fits[0]:
        assert got_starts[0].tolist() == starts + [-1] * (M + 1 - len(starts))
        assert got_lengths[0].tolist() == sizes + [-1] * (M - len(sizes))
    assert (np.asarray(got_starts[1]) == -1).all() and (np.asarray(got_lengths[1]) == -1).all()


@pytest.mark.heavy
@settings(max_examples=10)
@given(seed=st.integers(0, 999))
def test_segment_layout_after_the_library_lists_every_row_in_one_buffer(seed):
    """JAX turns rows into one list of element offsets; they must be those of the tokens in [B, S, H, hd] memory."""
    q, k, _, segments, _ = example(seed)
    starts, lengths, _ = layout(jnp.asarray(segments), 64)
    k = np.repeat(k, 2, 2)
    sizes, key_sizes, offsets, key_offsets = cudnn._fix_seqlen_offsets(lengths, lengths, starts, starts, q, k)
    flat = segments.reshape(-1)
    real = [(b, n) for b in range(2) for n in np.unique(segments[b]) if n]
    for entry, (b, n) in enumerate(real):
        tokens = np.flatnonzero(segments[b] == n) + b * 150
        assert sizes.reshape(-1)[entry] == key_sizes.reshape(-1)[entry] == len(tokens)
        assert offsets.reshape(-1)[entry] == tokens[0] * q.shape[2] * q.shape[3]
        assert key_offsets.reshape(-1)[entry] == tokens[0] * k.shape[2] * k.shape[3]
    assert sizes.sum() == (flat != 0).sum()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)


def lowered_for_cuda(f) -> str:
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def total(q, k, v, ids):
        return f(q, k, v, ids, scale=0.1).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(q, k, k, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("window", [None, 50])
def test_cudnn_attention_lowers_to_the_packed_causal_kernels(window):
    def f(*args, scale):
        return cudnn_attention(*args, scale=scale, window=window, max_segments=8)

    text = lowered_for_cuda(f).replace("\\22", "")
    for name in ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("):
        assert text.count(name) == 1
    for field in ("mask_type: PADDING_CAUSAL", "max_seg_per_batch: 8", f"sliding_window_length: {window or 0}"):
        assert text.count(field) == 2, field


@pytest.mark.heavy
@pytest.mark.usefixtures("hopper")
def test_cudnn_row_of_too_many_segments_gives_nan_and_no_other_answer(monkeypatch):
    monkeypatch.setattr(cudnn, "dot_product_attention", lambda q, k, v, **kwargs: q)
    q, k, v, segments, _ = example(0, dtype=BFLOAT16)
    segments[1] = np.repeat([1, 2], 75)
    out = cudnn_attention(*map(jnp.asarray, (q, k, v, segments)), scale=0.1, max_segments=2)
    assert np.isnan(np.asarray(out[0], np.float32)).all() and np.isfinite(np.asarray(out[1], np.float32)).all()


@pytest.mark.gpu
def test_auto_on_a_hopper_gpu_runs_cudnn():
    q, k, v, segments, _ = example(0, dtype=BFLOAT16)
    text = jax.jit(lambda *a: attention(*a, scale=0.1)).lower(q, k, v, segments).as_text()
    assert "__cudnn$fmhaSoftmax" in text
