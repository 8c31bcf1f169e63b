import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.model.logprobs import token_logprobs


def oracle(hidden, head, targets, temperature):
    """Float64 logprobs and entropies, and their Jacobians by the logits before temperature."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    logits = hidden @ head.T / temperature
    logp = logits - logits.max(-1, keepdims=True)
    logp = logp - np.log(np.exp(logp).sum(-1, keepdims=True))
    p = np.exp(logp)
    entropy = -(p * logp).sum(-1)
    rows = np.arange(len(targets))
    d_logprob = -p
    d_logprob[rows, targets] += 1
    d_entropy = -p * (logp + entropy[:, None])
    return logp[rows, targets], entropy, d_logprob / temperature, d_entropy / temperature


def example(seed, n, scale=1.0) -> Any:
    rng = np.random.default_rng(seed)
    hidden = (rng.normal(size=(n, 5)) * scale).astype(np.float32)
    head = rng.normal(size=(13, 5)).astype(np.float32)
    return hidden, head, rng.integers(0, 13, n).astype(np.int32)


# (tokens, chunk): one chunk, chunks that divide, that don't, of one token, larger than the input.
SPLITS = [(6, 6), (6, 2), (7, 3), (5, 1), (1, 4), (9, 5)]


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def values_and_gradients(hidden, head, targets, g_logprob, g_entropy, *, temperature, chunk):
    def both(hidden, head):
        return token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)

    values, pullback = jax.vjp(both, hidden, head)
    return values, pullback((g_logprob, g_entropy))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    split=st.sampled_from(SPLITS),
    temperature=st.sampled_from([0.3, 1.0]),
    scale=st.sampled_from([0.0, 1.0, 8.0]),
)
def test_token_logprobs_and_gradients_equal_float64_oracle(seed, split, temperature, scale):
    n, chunk = split
    hidden, head, targets = example(seed, n, scale)
    g_logprob, g_entropy = np.random.default_rng(seed + 1).normal(size=(2, n)).astype(np.float32)
    (logprobs, entropy), (d_hidden, d_head) = values_and_gradients(
        hidden, head, targets, g_logprob, g_entropy, temperature=temperature, chunk=chunk
    )
    want_logprobs, want_entropy, d_logprob, d_entropy = oracle(hidden, head, targets, temperature)
    assert logprobs.shape == entropy.shape == (n,) and logprobs.dtype == entropy.dtype == jnp.float32
    # Float32 logits carry an error of about |logit| * 1e-7.
    size = 1 + np.abs(hidden @ head.T).max() / temperature
    np.testing.assert_allclose(logprobs, want_logprobs, atol=2e-6 * size)
    np.testing.assert_allclose(entropy, want_entropy, atol=2e-6 * size)
    d_logits = g_logprob[:, None] * d_logprob + g_entropy[:, None] * d_entropy
    np.testing.assert_allclose(d_hidden, d_logits @ head, atol=1e-5 * size)
    np.testing.assert_allclose(d_head, d_logits.T @ hidden, atol=1e-5 * size * (1 + scale))


def test_token_logprobs_known_uniform_distribution():
    hidden, head, targets = example(0, 4, scale=0.0)
    logprobs, entropy = token_logprobs(hidden, head, targets)
    np.testing.assert_allclose(logprobs, -np.log(13), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(13), rtol=1e-6)


def test_token_logprobs_any_chunk_gives_the_same():
    hidden, head, targets = example(1, 12)
    whole = jax.jacrev(lambda h: token_logprobs(h, head, targets, temperature=0.7, chunk=12))(hidden)
    for chunk in (1, 5, 6, 100):
        part = jax.jacrev(lambda h, c=chunk: token_logprobs(h, head, targets, temperature=0.7, chunk=c))(hidden)
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_token_logprobs_logits_of_a_thousand_stay_finite():
    hidden, head, targets = example(2, 6, scale=1000.0)
    value, grads = jax.value_and_grad(
        lambda h, w: sum(x.sum() for x in token_logprobs(h, w, targets, temperature=0.1)), (0, 1)
    )(hidden, head)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)


def test_token_logprobs_bfloat16_gives_float32_and_gradients_in_input_dtypes():
    hidden, head, targets = example(3, 6)
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    (logprobs, _), pullback = jax.vjp(lambda h, w: token_logprobs(h, w, targets, chunk=4), hidden, head)
    want, *_ = oracle(hidden, jnp.asarray(head, jnp.bfloat16), targets, 1.0)
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, want, atol=1e-5)  # the sums are float32, so only the inputs are coarse
    # XLA-CPU keeps float32 where bfloat16 is asked for, so look at what is asked for.
    text = jax.jit(lambda h: token_logprobs(h, head, targets, chunk=4)).lower(hidden).as_text()
    assert "tensor<4x13xf32>" in text and "tensor<4x13xbf16>" not in text
    d_hidden, d_head = pullback((jnp.ones(6), jnp.zeros(6)))
    assert d_hidden.dtype == jnp.bfloat16 and d_head.dtype == jnp.float32


def test_token_logprobs_gradient_never_holds_all_logits():
    hidden, head, targets = example(4, 64)

    def total(h, w):
        return sum(x.sum() for x in token_logprobs(h, w, targets, chunk=8))

    text = jax.jit(jax.grad(total, (0, 1))).lower(hidden, head).as_text()
    assert "8x13xf32" in text and "64x13x" not in text and "8x8x13x" not in text


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(temperature=0.0), "temperature must be > 0"),
        (dict(chunk=0), "chunk must be >= 1"),
        (dict(targets=np.zeros(3, np.int32)), "wanted"),
        (dict(head=np.zeros((13, 4), np.float32)), "hidden is 5 wide, head is 4"),
    ],
)
def test_token_logprobs_bad_argument_is_refused(change, message):
    names = ("hidden", "head", "targets")
    with pytest.raises(ValueError, match=message):
        token_logprobs(**(dict(zip(names, example(0, 4), strict=True)) | change))
