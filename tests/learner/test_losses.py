import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from configs.schema import LossConfig
from learner.losses import LOSSES, MAX_LOG_RATIO, entropy_bonus, grpo_clip_loss, token_loss, truncated_is_loss

SHAPE = (2, 5)
NATS = hnp.arrays(np.float32, SHAPE, elements=st.floats(-8, 0, width=32))
ADVANTAGES = hnp.arrays(np.float32, SHAPE, elements=st.integers(-400, 400).map(lambda n: n / 100))
MASK = np.array([[1, 1, 1, 0, 1], [1, 0, 1, 1, 1]], bool)
EXTREME = np.array([[-300.0, -0.0, -90.0, -5.0, -1.0], [-1e4, -2.0, -0.5, -200.0, -30.0]], np.float32)


def value_and_grad(loss, logp, *args, **kwargs):
    args = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]

    def total(x):
        out = loss(x, *args, **kwargs)
        return out.loss.sum(), out

    (_, out), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logp))
    return np.asarray(out.loss), np.asarray(out.clipped), np.asarray(grad)


def near(ratio, bounds):
    """Where float32 and float64 may fall on different sides of a bound."""
    return np.any([np.abs(ratio / b - 1) < 1e-5 for b in bounds if b > 0], axis=0)


@settings(deadline=None, max_examples=60)
@given(logp=NATS, mu=NATS, adv=ADVANTAGES, c=st.floats(0.5, 4))
def test_truncated_is_value_and_gradient_match_float64_numpy(logp, mu, adv, c):
    loss, clipped, grad = value_and_grad(truncated_is_loss, logp, mu, adv, MASK, max_weight=c)
    ratio = np.exp(logp.astype(np.float64) - mu)
    weight = np.minimum(c, ratio)
    np.testing.assert_allclose(loss, np.where(MASK, -weight * adv * logp, 0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, np.where(MASK, -weight * adv, 0), rtol=1e-5, atol=1e-7)
    safe = ~near(ratio, [c])
    np.testing.assert_array_equal(clipped[safe], (MASK & (ratio > c))[safe])


@settings(deadline=None, max_examples=60)
@given(logp=NATS, mu=NATS, adv=ADVANTAGES, low=st.floats(0.05, 1), high=st.floats(0.05, 2))
def test_grpo_clip_value_and_gradient_match_float64_numpy(logp, mu, adv, low, high):
    loss, clipped, grad = value_and_grad(grpo_clip_loss, logp, mu, adv, MASK, clip_low=low, clip_high=high)
    ratio = np.exp(logp.astype(np.float64) - mu)
    want = np.zeros(SHAPE)
    want_grad, want_clipped = np.zeros(SHAPE), np.zeros(SHAPE, bool)
    for i in zip(*np.nonzero(MASK), strict=True):
        a, r = float(adv[i]), ratio[i]
        stops = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)  # PPO: no incentive to go further
        want_clipped[i] = stops
        want[i] = -a * min(max(r, 1 - low), 1 + high) if stops else -a * r
        want_grad[i] = 0.0 if stops else -a * r
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-7)
    safe = ~near(ratio, [1 - low, 1 + high])
    np.testing.assert_allclose(grad[safe], want_grad[safe], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(clipped[safe], want_clipped[safe])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_losses_extreme_ratios_stay_finite(name, sign):
    config = LossConfig(name=name)
    for logp, mu in [(EXTREME, EXTREME[::-1]), (EXTREME, 0 * EXTREME), (0 * EXTREME, EXTREME)]:
        adv = np.full(SHAPE, sign, np.float32)
        loss, _, grad = value_and_grad(LOSSES[name], logp, mu, adv, MASK, config)
        assert np.isfinite(loss).all() and np.isfinite(grad).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_losses_masked_tokens_of_any_value_leak_nothing(name, junk):
    config = LossConfig(name=name)
    rng = np.random.default_rng(0)
    logp, mu, adv = (rng.uniform(-3, 0, SHAPE).astype(np.float32) for _ in range(3))
    want = value_and_grad(LOSSES[name], logp, mu, adv, MASK, config)
    bad = [np.where(MASK, x, np.float32(junk)) for x in (logp, mu)]
    got = value_and_grad(LOSSES[name], *bad, np.where(MASK, adv, 0), MASK, config)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
    assert np.all(got[0][~MASK] == 0) and np.all(got[2][~MASK] == 0) and not got[1][~MASK].any()


def test_grpo_clip_negative_advantage_is_not_clipped_above():
    # Dual clip is off: a likely bad token is pushed down with its whole ratio, up to the float's safety cap.
    one = np.ones((1, 1), np.float32)
    _, clipped, grad = value_and_grad(grpo_clip_loss, 0 * one, -3 * one, -one, one > 0, clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(grad, [[np.exp(3.0)]], rtol=1e-6)
    assert not clipped.any() and MAX_LOG_RATIO > 3


def test_truncated_is_weight_is_a_constant_of_the_gradient():
    # If the weight were differentiated, the gradient would be -w A (1 + log pi) = +w A here.
    one = np.ones((1, 1), np.float32)
    _, _, grad = value_and_grad(truncated_is_loss, -2 * one, -2 * one, one, one > 0, max_weight=5.0)
    np.testing.assert_allclose(grad, [[-1.0]], rtol=1e-6)


def test_token_loss_entropy_bonus_lowers_the_loss_of_trained_tokens_only():
    rng = np.random.default_rng(1)
    logp, mu, adv, entropy = (jnp.asarray(rng.uniform(-3, 0, SHAPE), jnp.float32) for _ in range(4))
    mask = jnp.asarray(MASK)
    without = token_loss(logp, entropy, mu, adv, mask, LossConfig())
    with_bonus = token_loss(logp, entropy, mu, adv, mask, LossConfig(entropy_coef=0.3))
    want = np.where(MASK, np.asarray(without.loss) - 0.3 * np.asarray(entropy), 0)
    np.testing.assert_allclose(with_bonus.loss, want, rtol=1e-6)
    grad = jax.grad(lambda h: entropy_bonus(h, mask, coef=0.3).sum())(entropy)
    np.testing.assert_allclose(grad, np.where(MASK, -0.3, 0), rtol=1e-6)


def test_losses_bad_bounds_are_refused():
    x, mask = jnp.zeros(SHAPE), jnp.asarray(MASK)
    with pytest.raises(ValueError, match="max_weight must be > 0, got 0"):
        truncated_is_loss(x, x, x, mask, max_weight=0.0)
    with pytest.raises(ValueError, match="clip_low"):
        grpo_clip_loss(x, x, x, mask, clip_low=1.5, clip_high=0.2)
