"""On-policy distillation in float64: the advantage with its expected gradient, and the KL of distributions."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from configs.sections import LossConfig
from learner.objective.advantages import token_advantages
from learner.objective.distillation import divergence
from learner.objective.losses import TokenInputs, token_loss
from tests.bridge.factories import make_rollout

SHAPE = (6,)
NATS = hnp.arrays(np.float32, SHAPE, elements=st.floats(-8, 0, width=32))
MASK = np.array([1, 1, 1, 1, 0, 1], bool)
TAUGHT = np.array([1, 0, 1, 1, 1, 1], bool)
CONFIG = LossConfig(name="truncated_is", max_weight=3.0, teacher_coef=0.5, teacher_path="t")


def run(logprobs, mu, advantages, teacher, taught, config, mask=MASK):
    """The token losses and the gradient of their sum."""
    inputs = TokenInputs(
        behavior_logprobs=jnp.asarray(mu),
        advantages=jnp.asarray(advantages),
        loss_mask=jnp.asarray(mask),
        teacher_logprobs=jnp.asarray(teacher),
        has_teacher=jnp.asarray(taught),
    )

    def total(x):
        out = token_loss(x, jnp.zeros(x.shape), inputs, config)
        return out.loss.sum(), out

    (_, out), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logprobs))
    return out, np.asarray(gradient)


def constants(**values):
    return {name: np.full(SHAPE, value, np.float32) for name, value in values.items()}


@given(logprobs=NATS, mu=NATS, advantages=NATS, teacher=NATS, coef=st.floats(0.0625, 4, width=32))
@example(**constants(logprobs=-1, mu=-1, advantages=0, teacher=-3), coef=1.0)  # on-policy, without a reward
@example(**constants(logprobs=-1, mu=-5, advantages=-2, teacher=-0.5), coef=2.0)  # the weight is truncated
def test_gradient_is_the_losses_own_of_the_advantage_less_the_reverse_kl(logprobs, mu, advantages, teacher, coef):
    config = dataclasses.replace(CONFIG, teacher_coef=coef)
    out, gradient = run(logprobs, mu, advantages, teacher, TAUGHT, config)
    log_pi, log_mu, a, log_t = (x.astype(np.float64) for x in (logprobs, mu, advantages, teacher))
    kl = np.where(TAUGHT, log_pi - log_t, 0)
    want = -np.minimum(3.0, np.exp(log_pi - log_mu)) * (a - coef * kl)
    np.testing.assert_allclose(gradient, np.where(MASK, want, 0), rtol=2e-5, atol=1e-4)
    np.testing.assert_allclose(out.teacher_kl, np.where(MASK, kl, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_expected_gradient_is_that_of_the_reverse_kl_at_finite_differences(is_on_policy):
    """Summed over all tokens of a vocabulary by the probability with which mu samples each, in place of samples."""
    rng = np.random.default_rng(0)
    z, z_mu, z_teacher = rng.normal(size=(3, 7))
    z_mu = z if is_on_policy else z_mu

    def log_softmax(x):
        return x - math.log(np.exp(x).sum())

    def reverse_kl(x):
        log_pi = log_softmax(x)
        return (np.exp(log_pi) * (log_pi - log_softmax(z_teacher))).sum()

    steps = 1e-5 * np.eye(z.size)
    want = [(reverse_kl(z + step) - reverse_kl(z - step)) / 2e-5 for step in steps]
    config = dataclasses.replace(CONFIG, teacher_coef=2.0, max_weight=1e6)
    mu, teacher = (jnp.asarray(log_softmax(x), jnp.float32) for x in (z_mu, z_teacher))
    inputs = TokenInputs(
        behavior_logprobs=mu,
        advantages=jnp.zeros(7),
        loss_mask=jnp.ones(7, bool),
        teacher_logprobs=teacher,
        has_teacher=jnp.ones(7, bool),
    )

    def expected(x):
        losses = token_loss(jax.nn.log_softmax(x), jnp.zeros(7), inputs, config).loss
        return (jnp.exp(mu) * losses).sum()

    np.testing.assert_allclose(jax.grad(expected)(jnp.asarray(z, jnp.float32)), 2.0 * np.array(want), atol=1e-5)


@pytest.mark.parametrize("name", ["grpo_clip", "gspo", "cispo", "topr", "decoupled_ppo", "masked_is"])
def test_every_loss_takes_the_sum_as_its_advantage(name):
    """With advantages that are the sum already, the same loss without a teacher gives the same."""
    rng = np.random.default_rng(1)
    logprobs, mu, teacher, a = (-rng.uniform(0.1, 3, SHAPE).astype(np.float32) for _ in range(4))
    extras = dict(proximal_logprobs=jnp.asarray(mu), sequence_log_ratio=jnp.full(SHAPE, 0.0))

    def gradient(advantages, config, **more):
        inputs = TokenInputs(
            behavior_logprobs=jnp.asarray(mu),
            advantages=jnp.asarray(advantages, jnp.float32),
            loss_mask=jnp.asarray(MASK),
            **extras,
            **more,
        )
        return jax.grad(lambda x: token_loss(x, jnp.zeros(SHAPE), inputs, config).loss.sum())(jnp.asarray(logprobs))

    plain = LossConfig(name=name)
    config = dataclasses.replace(plain, teacher_coef=0.5, teacher_path="t")
    got = gradient(a, config, teacher_logprobs=jnp.asarray(teacher), has_teacher=jnp.asarray(TAUGHT))
    sums = a - 0.5 * np.where(TAUGHT, logprobs - teacher, 0)
    np.testing.assert_allclose(got, gradient(sums, plain), rtol=1e-5, atol=1e-6)


def test_what_a_token_without_teacher_or_training_has_for_a_teachers_logprob_is_not_read():
    logprobs = mu = advantages = np.full(SHAPE, -1.0, np.float32)
    teacher = np.where(MASK & TAUGHT, -2.0, np.nan).astype(np.float32)
    out, gradient = run(logprobs, mu, advantages, teacher, TAUGHT, CONFIG)
    assert np.isfinite(gradient).all() and np.isfinite(out.loss).all() and np.isfinite(out.teacher_kl).all()


def test_logprobs_of_a_teacher_that_are_missing_are_refused():
    x = jnp.zeros(SHAPE)
    inputs = TokenInputs(behavior_logprobs=x, advantages=x, loss_mask=jnp.asarray(MASK))
    with pytest.raises(ValueError, match=r"loss.teacher_coef=0.5 needs TokenInputs.teacher_logprobs, got None"):
        token_loss(x, x, inputs, CONFIG)


def test_advantage_none_is_zero_for_rewards_that_differ():
    config = dataclasses.replace(CONFIG, advantage="none")
    rollouts = [make_rollout(3, reward=reward) for reward in (0.0, 1.0)]
    for advantages in token_advantages(rollouts, np.array([0.0, 1.0]), config):
        np.testing.assert_array_equal(advantages, np.zeros(3, np.float32))


def kl_of(kind, log_p, log_q):
    """The KL in float64, each given as logprobs over K tokens and all others."""
    p, q = (np.append(np.exp(x), 1 - np.exp(x).sum()) for x in (log_p, log_q))
    p, q = (p, q) if kind == "reverse_kl" else (q, p)
    return np.sum(p * np.log(p / q))


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 1.0, 3.0]))
def test_divergence_and_its_gradient_are_those_of_a_kl_with_the_rest_as_one_token(kind, seed, scale):
    rng = np.random.default_rng(seed)
    z = scale * rng.normal(size=(2, 9))
    log_p, log_q = (z - np.log(np.exp(z).sum(-1, keepdims=True)))[:, :4]
    got, gradient = jax.value_and_grad(divergence)(jnp.asarray(log_p), jnp.asarray(log_q), kind)
    np.testing.assert_allclose(got, kl_of(kind, log_p, log_q), rtol=1e-4, atol=1e-5)
    steps = 1e-6 * np.eye(4)
    want = [(kl_of(kind, log_p + step, log_q) - kl_of(kind, log_p - step, log_q)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("log_p", [[-1e-9, -30.0], [-30.0, -1e-9], [-20.0, -20.0]])
def test_divergence_from_a_teacher_that_is_certain_is_finite_with_a_finite_gradient(kind, log_p):
    got, gradient = jax.value_and_grad(divergence)(jnp.array(log_p), jnp.array([0.0, -30.0]), kind)
    assert np.isfinite(got) and got > -1e-5 and np.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_divergence_is_added_to_the_losses_of_tokens_with_a_teacher_and_no_advantage_changes(kind):
    plain = dataclasses.replace(CONFIG, teacher_coef=0.0, teacher_path="")
    config = dataclasses.replace(CONFIG, teacher_divergence=kind)
    x = jnp.linspace(-3, -1, SHAPE[0])
    apart = jnp.asarray(np.where(MASK & TAUGHT, np.linspace(0, 2, SHAPE[0]), np.nan), jnp.float32)
    inputs = TokenInputs(behavior_logprobs=x, advantages=x, loss_mask=jnp.asarray(MASK))
    taught = dataclasses.replace(inputs, has_teacher=jnp.asarray(TAUGHT))
    got = token_loss(x, x, taught, config, apart)
    kl = np.where(MASK & TAUGHT, apart, 0)
    np.testing.assert_allclose(got.loss, token_loss(x, x, inputs, plain).loss + 0.5 * kl, rtol=1e-6)
    np.testing.assert_allclose(got.teacher_kl, kl)
    with pytest.raises(ValueError, match=f"loss.teacher_divergence={kind}: expected a divergence"):
        token_loss(x, x, taught, config)
