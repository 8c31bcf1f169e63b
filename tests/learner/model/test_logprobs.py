import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.model.logprobs import Head, token_loss_sum, token_scores, top_tokens

WORDS, WIDTH = 13, 5


def oracle(hidden, weight, targets, temperature, soft_cap=None):
    """Float64 logprobs and entropies [B, S], and their Jacobians by the logits before cap and temperature [B, S, V].

    And the log-probabilities of all words, with the slope by which a Jacobian of theirs is multiplied, [B, S, V].
    """
    logits, slope = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T, np.ones(())
    if soft_cap is not None:
        slope = np.cosh(logits / soft_cap) ** -2
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = logits / temperature
    logp = logits - logits.max(-1, keepdims=True)
    logp = logp - np.log(np.exp(logp).sum(-1, keepdims=True))
    p = np.exp(logp)
    entropy = -(p * logp).sum(-1)
    onehot = np.eye(WORDS)[targets]
    d_entropy = -p * (logp + entropy[..., None])
    d_logprob, d_entropy = (slope * d / temperature for d in (onehot - p, d_entropy))
    return (logp * onehot).sum(-1), entropy, d_logprob, d_entropy, logp, slope / temperature


def example(seed, shape=(2, 6), scale=1.0, share=0.6) -> Any:
    rng = np.random.default_rng(seed)
    hidden = (rng.normal(size=(*shape, WIDTH)) * scale).astype(np.float32)
    weight = rng.normal(size=(WORDS, WIDTH)).astype(np.float32)
    return hidden, weight, rng.integers(0, WORDS, shape).astype(np.int32), rng.random(shape) < share


def loss(logprobs, entropy, of_others, inputs):
    """Any smooth function of all, with a token's own numbers."""
    total = inputs["a"] * jnp.sin(logprobs) + inputs["b"] * entropy**2
    if of_others is not None:
        total = total + (inputs["c"] * jnp.cos(of_others)).sum(-1)
    return total, {"twice": 2 * logprobs}


def inputs_of(seed, mask):
    a, b = np.random.default_rng(seed + 1).normal(size=(2, *mask.shape)).astype(np.float32)
    return {"a": np.where(mask, a, 0), "b": np.where(mask, b, 0)}


@functools.partial(jax.jit, static_argnames="head")
def value_and_gradients(hidden, weight, targets, mask, inputs, others=None, *, head):
    def total(hidden, weight):
        return token_loss_sum(head, loss, hidden, weight, targets, mask, inputs, others)

    return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, weight)


@pytest.mark.heavy
@given(
    seed=st.integers(0, 2**31),
    # One chunk, chunks that divide, that don't, of one token, larger than the input.
    split=st.sampled_from([((1, 6), 6), ((2, 3), 2), ((1, 7), 3), ((5, 1), 1), ((1, 1), 4), ((3, 3), 5)]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    temperature=st.sampled_from([0.3, 1.0]),
    scale=st.sampled_from([0.0, 1.0, 4.0]),
    soft_cap=st.sampled_from([None, 3.0]),
    words_last=st.booleans(),
)
def test_token_loss_sum_and_gradients_equal_float64_oracle(
    seed, split, share, temperature, scale, soft_cap, words_last
):
    shape, chunk = split
    hidden, weight, targets, mask = example(seed, shape, scale, share)
    inputs = inputs_of(seed, mask)
    head = Head(temperature=temperature, soft_cap=soft_cap, chunk=chunk, words_last=words_last)
    (value, (scores, more)), (d_hidden, d_weight) = value_and_gradients(
        hidden, weight, targets, mask, inputs, head=head
    )
    logprobs, entropy, d_logprob, d_entropy, *_ = oracle(hidden, weight, targets, temperature, soft_cap)
    # Float32 logits carry an error of about |logit| * 1e-7.
    size = 1 + np.abs(hidden @ weight.T).max() / temperature
    a, b = inputs["a"], inputs["b"]
    np.testing.assert_allclose(scores.logprobs, np.where(mask, logprobs, 0), atol=2e-6 * size)
    np.testing.assert_allclose(scores.entropy, np.where(mask, entropy, 0), atol=2e-6 * size)
    np.testing.assert_allclose(more["twice"], np.where(mask, 2 * logprobs, 0), atol=4e-6 * size)
    np.testing.assert_allclose(value, (a * np.sin(logprobs) + b * entropy**2).sum(), atol=5e-5 * size)
    d_logits = (a * np.cos(logprobs))[..., None] * d_logprob + (2 * b * entropy)[..., None] * d_entropy
    np.testing.assert_allclose(d_hidden, d_logits @ weight, atol=2e-5 * size)
    want = np.einsum("bsv,bsd->vd", d_logits, hidden)
    np.testing.assert_allclose(d_weight, want, atol=2e-5 * size * (1 + scale))
    alone = token_scores(head, hidden, weight, targets, mask)
    for one, both in zip(alone, scores, strict=True):
        np.testing.assert_allclose(one, both, atol=1e-6 * size)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("words_last", [False, True])
def test_gradients_of_other_words_equal_float64_oracle(soft_cap, words_last):
    """Among the others of a position may be its target."""
    hidden, weight, targets, mask = example(4)
    rng = np.random.default_rng(4)
    others = np.argsort(rng.random((*mask.shape, WORDS)))[..., :4].astype(np.int32)
    inputs = inputs_of(4, mask) | {"c": rng.normal(size=others.shape).astype(np.float32)}
    head = Head(temperature=0.7, soft_cap=soft_cap, chunk=4, words_last=words_last)
    (value, _), (d_hidden, d_weight) = value_and_gradients(hidden, weight, targets, mask, inputs, others, head=head)
    logprobs, entropy, d_logprob, d_entropy, logp, slope = oracle(hidden, weight, targets, 0.7, soft_cap)
    a, b, c = inputs["a"], inputs["b"], np.where(mask[..., None], inputs["c"], 0)
    of_others = np.take_along_axis(logp, others, -1)
    want = a * np.sin(logprobs) + b * entropy**2 + (c * np.cos(of_others)).sum(-1)
    np.testing.assert_allclose(value, want.sum(), rtol=1e-5)
    d_others = (-c * np.sin(of_others))[..., None] * (np.eye(WORDS)[others] - np.exp(logp)[..., None, :])
    d_logits = (a * np.cos(logprobs))[..., None] * d_logprob + (2 * b * entropy)[..., None] * d_entropy
    d_logits = d_logits + slope * d_others.sum(-2)
    np.testing.assert_allclose(d_hidden, d_logits @ weight, atol=5e-5)
    np.testing.assert_allclose(d_weight, np.einsum("bsv,bsd->vd", d_logits, hidden), atol=5e-5)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_top_tokens_are_the_likeliest_with_their_logprobs(soft_cap):
    hidden, weight, targets, mask = example(5)
    found = top_tokens(Head(temperature=0.7, soft_cap=soft_cap, chunk=4), hidden, weight, mask, k=3)
    *_, logp, _ = oracle(hidden, weight, targets, 0.7, soft_cap)
    want = np.argsort(-logp)[..., :3]
    np.testing.assert_array_equal(found.tokens, np.where(mask[..., None], want, 0))
    of_want = np.where(mask[..., None], np.take_along_axis(logp, want, -1), 0)
    np.testing.assert_allclose(found.logprobs, of_want, atol=1e-5)


def test_token_scores_known_uniform_distribution():
    hidden, weight, targets, _ = example(0, scale=0.0)
    logprobs, entropy = token_scores(Head(), hidden, weight, targets, jnp.ones((2, 6), bool))
    np.testing.assert_allclose(logprobs, -np.log(WORDS), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(WORDS), rtol=1e-6)


def test_token_loss_sum_gradient_scales_with_its_cotangent():
    hidden, weight, targets, mask = example(1)
    inputs = inputs_of(1, mask)

    def total(h, w, factor):
        return factor * token_loss_sum(Head(chunk=4), loss, h, w, targets, mask, inputs)[0]

    once, thrice = (jax.grad(total, (0, 1))(hidden, weight, factor) for factor in (1.0, -3.0))
    for x, y in zip(once, thrice, strict=True):
        assert np.abs(x).max() > 0.1
        np.testing.assert_allclose(-3 * x, y, rtol=1e-5, atol=1e-6)


def test_token_loss_sum_logits_of_a_thousand_stay_finite():
    hidden, weight, targets, mask = example(2, scale=1000.0)
    (value, _), grads = value_and_gradients(
        hidden, weight, targets, mask, inputs_of(2, mask), head=Head(temperature=0.1, chunk=4)
    )
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)


def test_token_loss_sum_bfloat16_sums_in_float32_and_gives_gradients_in_input_dtypes():
    hidden, weight, targets, mask = example(3)
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    inputs = inputs_of(3, mask)
    (_, (scores, _)), (d_hidden, d_weight) = value_and_gradients(
        hidden, weight, targets, mask, inputs, head=Head(chunk=4)
    )
    want, *_ = oracle(hidden, jnp.asarray(weight, jnp.bfloat16), targets, 1.0)
    # The sums are float32, so only the inputs are coarse.
    np.testing.assert_allclose(scores.logprobs, np.where(mask, want, 0), atol=1e-5)
    assert d_hidden.dtype == jnp.bfloat16 and d_weight.dtype == jnp.float32


@pytest.mark.heavy
def test_token_loss_sum_never_holds_all_logits():
    shape, tokens = (8, 512), 8 * 512
    hidden = jax.ShapeDtypeStruct((*shape, WIDTH), jnp.float32)
    weight = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    rows = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_)]
    inputs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in "ab"}

    def temp_bytes(chunk: int) -> int:
        compiled = value_and_gradients.lower(hidden, weight, *rows, inputs, head=Head(chunk=chunk)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    all_logits = tokens * 4096 * 4
    assert temp_bytes(64) < all_logits / 8
    assert temp_bytes(tokens) > all_logits  # the measure sees them where they are


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(targets=np.zeros((2, 3), np.int32)), "expected"),
        (dict(weight=np.zeros((WORDS, 4), np.float32)), "hidden is 5 wide, head is 4"),
    ],
)
def test_token_scores_shapes_that_do_not_agree_are_refused(change, message):
    names = ("hidden", "weight", "targets", "mask")
    with pytest.raises(ValueError, match=message):
        token_scores(Head(), **(dict(zip(names, example(0), strict=True)) | change))


@pytest.mark.parametrize(
    "change,message",
    [(dict(temperature=0.0), "temperature"), (dict(soft_cap=0.0), "soft_cap"), (dict(chunk=0), "chunk")],
)
def test_head_numbers_that_are_not_positive_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Head(**change)
