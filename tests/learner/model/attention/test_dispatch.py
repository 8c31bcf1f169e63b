import types
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.model.attention.dispatch import attention, choose_path
from tests.learner.model.attention.attention_cases import (
    BFLOAT16,
    SPLASH,
    SPLASH_BLOCKS,
    XLA,
    assert_close,
    every_path,
    example,
    oracle,
    seen,
)


@pytest.mark.heavy
@every_path
@pytest.mark.parametrize(
    "dtype,kv_heads,window",
    [(np.float32, 1, None), (np.float32, 2, None), (np.float32, 4, 7), (BFLOAT16, 2, None), (BFLOAT16, 4, 7)],
    ids=["float32-group-4", "float32-group-2", "float32-group-1-window", "bfloat16-group-2", "bfloat16-group-1-window"],
)
def test_attention_values_and_gradients_equal_float64(run, dtype, kv_heads, window):
    run.skip_unless(dtype=dtype)
    q, k, v, segments, d_out = example(kv_heads, length=run.length, kv_heads=kv_heads, dtype=dtype)
    got = run.with_gradients(q, k, v, segments, d_out, window=window)
    want = oracle(q, k, v, segments, d_out, window=window)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(a, b, dtype, name)


@pytest.mark.heavy
@every_path
@pytest.mark.parametrize("dtype,window", [(np.float32, None), (np.float32, 7), (BFLOAT16, None)])
def test_attention_with_a_soft_cap_equals_float64_or_is_refused(run, dtype, window):
    run.skip_unless(dtype=dtype)
    q, k, v, segments, d_out = example(5, length=run.length, dtype=dtype)
    if not run.soft_caps:
        with pytest.raises(ValueError, match="it knows no soft cap"):
            run.with_gradients(q, k, v, segments, d_out, soft_cap=0.8)
        return
    got = run.with_gradients(q, k, v, segments, d_out, window=window, soft_cap=0.8)
    want = oracle(q, k, v, segments, d_out, window=window, soft_cap=0.8)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(a, b, dtype, name)
    uncapped = oracle(q, k, v, segments, d_out, window=window)
    assert np.abs(uncapped[1] - want[1]).max() > 0.1 * np.abs(want[1]).max()


# The one daily case of a row of several blocks.
@pytest.mark.heavy
def test_splash_over_several_blocks_with_window_and_soft_cap_equals_float64():
    q, k, v, segments, d_out = example(5, length=SPLASH_BLOCKS.length, kv_heads=2)
    got = SPLASH_BLOCKS.with_gradients(q, k, v, segments, d_out, window=7, soft_cap=0.8)
    want = oracle(q, k, v, segments, d_out, window=7, soft_cap=0.8)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(a, b, np.float32, name)


@pytest.mark.heavy
@every_path
def test_attention_packed_row_equals_each_segment_alone(run):
    dtype = np.float32 if run.float32 else BFLOAT16
    q, k, v, segments, d_out = example(11, length=run.length, dtype=dtype)
    packed = run.with_gradients(q, k, v, segments, d_out)
    for b, number in [(row, n) for row in range(2) for n in np.unique(segments[row]) if n]:
        here = segments[b] == number
        alone = [np.zeros_like(x) for x in (q, k, v, d_out)]
        for x, whole in zip(alone, (q, k, v, d_out), strict=True):
            x[0, : here.sum()] = whole[b, here]
        ids = np.zeros_like(segments)
        ids[0, : here.sum()] = 1
        for a, c in zip(packed, run.with_gradients(*alone[:3], ids, alone[3]), strict=True):
            a, c = np.asarray(a, np.float32)[b, here], np.asarray(c, np.float32)[0, : here.sum()]
            np.testing.assert_allclose(a, c, atol=2e-5 if run.float32 else 3e-2)


@pytest.mark.heavy
@every_path
@given(seed=st.integers(0, 2**31), b=st.integers(0, 1), j=st.integers(0, 2**31))
def test_attention_token_not_seen_moves_nothing(run, seed, b, j):
    dtype = np.float32 if run.float32 else BFLOAT16
    q, k, v, segments, _ = example(seed, length=run.length, dtype=dtype)
    j %= run.length
    q2, k2, v2 = q.copy(), k.copy(), v.copy()
    for x in (q2, k2, v2):
        x[b, j] += 1
    before, after = np.asarray(run(q, k, v, segments)), np.asarray(run(q2, k2, v2, segments))
    moved = (before != after).any((-1, -2))
    # To the bit: whoever doesn't see the token is unmoved; whoever does is moved (bfloat16 may round it off).
    sees = seen(segments[b : b + 1])[0, :, j]
    assert not moved[1 - b].any() and not (moved[b] & ~sees).any()
    if run.float32:
        np.testing.assert_array_equal(moved[b], sees)


@pytest.mark.heavy
@every_path
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_attention_padding_is_zero_and_has_no_gradient(run, dtype):
    run.skip_unless(dtype=dtype)
    q, k, v, segments, d_out = example(3, length=run.length, dtype=dtype)
    segments[1] = 0
    # Scores far out of exp's range, and padding with huge keys that must not be touched.
    q = (q * 300).astype(dtype)
    k = np.where((segments == 0)[..., None, None], 1e30, k).astype(dtype)
    for x in run.with_gradients(q, k, v, segments, d_out):
        x = np.asarray(x, np.float32)
        assert np.isfinite(x).all() and not x[segments == 0].any() and x[0].any()


def a_device(platform: str, **more: Any) -> Any:
    return types.SimpleNamespace(platform=platform, **more)


HOPPER, AMPERE = a_device("gpu", compute_capability="9.0"), a_device("gpu", compute_capability="8.0")
CALL: dict[str, Any] = dict(dtype=BFLOAT16, head_dim=128, window=None, sequence=1)


@pytest.mark.parametrize(
    "device,change,want",
    [
        (a_device("cpu"), {}, "xla"),
        (a_device("tpu"), {}, "splash"),
        (a_device("tpu"), dict(window=4096, sequence=2, dtype=np.float32), "splash"),
        (HOPPER, {}, "cudnn"),
        (HOPPER, dict(window=4096), "cudnn"),
        (HOPPER, dict(dtype=np.float32), "xla"),
        (HOPPER, dict(head_dim=100), "xla"),
        (HOPPER, dict(sequence=2), "xla"),
        (HOPPER, dict(soft_cap=50.0), "xla"),
        (HOPPER, dict(head_dim=256), "xla"),
        (a_device("tpu"), dict(soft_cap=50.0, window=4096, head_dim=256), "splash"),
        (AMPERE, {}, "xla"),
        (a_device("gpu", compute_capability="gfx942"), {}, "xla"),
        (HOPPER, dict(has_prefixes=True), "xla"),
    ],
)
def test_auto_path_is_the_best_that_serves_the_call(device, change, want):
    assert choose_path("auto", device=device, **(CALL | change)) == want


@pytest.mark.parametrize(
    "path,device,change,message",
    [
        ("flash", HOPPER, {}, r"expected 'auto' or one of \('splash'"),
        ("splash", a_device("cpu"), {}, r"'splash' on cpu: it needs a TPU; take 'auto' or one of \['xla'\]"),
        ("cudnn", a_device("tpu"), {}, r"'cudnn' on tpu: it needs an NVIDIA GPU; .*\['splash', 'xla'\]"),
        ("cudnn", AMPERE, {}, "the GPU has 8.0"),
        ("cudnn", HOPPER, dict(dtype=np.float32), r"bfloat16 or float16, got float32; .*\['xla'\]"),
        ("cudnn", HOPPER, dict(head_dim=100), "multiple of 8 up to 128, got 100"),
        ("cudnn", HOPPER, dict(sequence=2), "splits them over sequence"),
        ("cudnn", HOPPER, dict(soft_cap=9.0), "no soft cap"),
        ("cudnn", HOPPER, dict(has_prefixes=True), r"no shared prompts .*\['xla'\]"),
        ("splash", a_device("tpu"), dict(has_prefixes=True), "no shared prompts"),
        ("auto", a_device("cpu"), dict(has_prefixes=True, window=9), "share_prompts: .*window"),
        ("auto", a_device("cpu"), dict(has_prefixes=True, sequence=2), "share_prompts: .*over sequence"),
    ],
)
def test_named_path_that_cannot_serve_the_call_is_refused(path, device, change, message):
    with pytest.raises(ValueError, match=message):
        choose_path(path, device=device, **(CALL | change))


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(path="flash"), "attention path: expected 'auto' or one of .*, got 'flash'"),
        (dict(block=0), "block must be >= 1"),
        (dict(window=0), "window must be >= 1"),
        (dict(soft_cap=0.0), "soft_cap must be > 0"),
        (dict(max_segments=0), "max_segments must be >= 1"),
        (dict(k=np.zeros((2, 150, 3, 24), np.float32)), "attention shapes: got"),
        (dict(k=np.zeros((2, 150, 3, 24)), v=np.zeros((2, 150, 3, 24))), "4 query heads do not divide by 3"),
        (dict(segment_ids=np.zeros((2, 9), np.int32)), "segment_ids: expected"),
    ],
)
def test_attention_bad_argument_is_refused(change, message):
    call = dict(zip(("q", "k", "v", "segment_ids"), example(0), strict=False))
    with pytest.raises(ValueError, match=message):
        attention(**(call | dict(scale=1.0) | change))


@pytest.mark.heavy
@pytest.mark.parametrize("run", [XLA, SPLASH], ids=lambda v: v.name)
def test_attention_gradient_under_checkpoint_and_scan_equals_two_calls(run):
    q, k, v, segments, d_out = example(2)

    def scanned(q):
        layer = jax.checkpoint(lambda x, _: (run(x, k, v, segments), None))
        return (jax.lax.scan(layer, q, None, length=2)[0] * d_out).sum()

    got = jax.grad(scanned)(q)
    middle = np.asarray(run(q, k, v, segments))
    d_middle = np.asarray(run.with_gradients(middle, k, v, segments, d_out)[1])
    np.testing.assert_allclose(got, run.with_gradients(q, k, v, segments, d_middle)[1], atol=1e-6)
