"""Every loss, its gradient and its penalties against float64 numpy written apart from the code under test.

`objective` below is a token's objective with every stop-gradient taken apart: the policy's logprob comes in twice,
as the variable `x` and as the constant `c` that weights are made of. Its derivative in x alone is taken by central
differences in float64, which knows nothing of the surrogate that the code differentiates.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from configs.sections import LossConfig
from configs.sections.loss_table import CUSTOM_LOSS, LOSS_CONSTANTS
from learner.objective.kl_estimators import MAX_LOG_RATIO
from learner.objective.losses import LOSSES, Needs, TokenInputs, needs, token_loss

SHAPE = (2, 5)
NATS = hnp.arrays(np.float32, SHAPE, elements=st.floats(-8, 0, width=32))
ADVANTAGES = hnp.arrays(np.float32, SHAPE, elements=st.integers(-400, 400).map(lambda n: n / 100))
MASKS = hnp.arrays(np.bool_, SHAPE)
MASK = np.array([[1, 1, 1, 0, 1], [1, 0, 1, 1, 1]], bool)
EXTREME = np.array([[-300.0, -0.0, -90.0, -5.0, -1.0], [-1e4, -2.0, -0.5, -200.0, -30.0]], np.float32)
WHOLE: dict[str, Any] = {
    "dapo": dict(overlong_buffer_tokens=4),
    "dr_grpo": dict(advantage="dr_grpo", normalization="constant"),
    "ppo_clip": dict(proximal="round"),
    "decoupled_ppo": dict(proximal="round"),
    "tis": dict(proximal="round"),
    "masked_is": dict(proximal="round"),
}
"""What a name wants besides itself (or, with pi_prox, what makes its clip count)."""


def config_of(name, **fields):
    return LossConfig(name=name, **(WHOLE.get(name, {}) | fields))


def inputs_of(config, mu, adv, mask=MASK, *, prox=None, ref=None, seq=None):
    """TokenInputs with what the loss needs; a missing extra is mu."""
    wanted = needs(config)
    extras = {
        "proximal_logprobs": (wanted.proximal, mu if prox is None else prox),
        "reference_logprobs": (wanted.reference, mu if ref is None else ref),
        "sequence_log_ratio": (wanted.sequence_ratio, 0 * mu if seq is None else seq),
    }
    return TokenInputs(
        behavior_logprobs=jnp.asarray(mu),
        advantages=jnp.asarray(adv),
        loss_mask=jnp.asarray(mask),
        **{name: jnp.asarray(x) for name, (is_needed, x) in extras.items() if is_needed},
    )


def run(logp, inputs, config, entropy=None):
    """(TokenLoss, gradient in logp) as numpy."""
    entropy = jnp.zeros(logp.shape) if entropy is None else jnp.asarray(entropy)

    def total(x):
        out = token_loss(x, entropy, inputs, config)
        return out.loss.sum(), out

    (_, out), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logp))
    return jax.tree.map(np.asarray, out), np.asarray(grad)


def objective(name, x, c, mu, prox, seq, adv, k):
    """One token's objective (as its paper writes it, to be maximised), all float64; k is the constants in force."""

    def ppo(ratio):
        inside = min(max(ratio, 1 - k["clip_low"]), 1 + k["clip_high"])
        value = min(ratio * adv, inside * adv)
        return max(value, k["dual_clip"] * adv) if adv < 0 and "dual_clip" in k else value

    def between(value, low, high):
        return low if value < low else high if value > high else value

    w, rho = math.exp(c - mu), math.exp(prox - mu)
    match name:
        case "reinforce":
            return adv * x
        case "ppo_clip":
            return ppo(math.exp(x - prox))
        case "truncated_is":
            return min(k["max_weight"], w) * adv * x
        case "grpo_clip" | "dapo" | "dr_grpo":
            return ppo(math.exp(x - mu))
        case "gspo":
            return ppo(math.exp(seq) * math.exp(x - c))
        case "decoupled_ppo" | "tis":
            return min(rho, k["max_weight"]) * ppo(math.exp(x - prox))
        case "masked_is":
            return rho * ppo(math.exp(x - prox)) if k["min_weight"] <= rho <= k["max_weight"] else 0.0
        case "cispo":
            return between(w, 1 - k["clip_low"], 1 + k["clip_high"]) * adv * x
        case "sft":
            return x
        case "topr":
            return (1.0 if adv > 0 else between(w, k["min_weight"], k["max_weight"])) * adv * x
    raise AssertionError(name)


def was_clipped(name, w, rho, r, s, adv, k):
    """Whether the correction changed a token's gradient."""

    def ppo(ratio):
        if adv > 0:
            return ratio > 1 + k["clip_high"]
        return adv < 0 and (ratio < 1 - k["clip_low"] or ratio > k.get("dual_clip", math.inf))

    match name:
        case "reinforce":
            return False
        case "ppo_clip":
            return ppo(r)
        case "truncated_is":
            return w > k["max_weight"]
        case "grpo_clip" | "dapo" | "dr_grpo":
            return ppo(w)
        case "gspo":
            return ppo(s)
        case "decoupled_ppo" | "tis":
            return ppo(r) or rho > k["max_weight"]
        case "masked_is":
            return ppo(r) or not k["min_weight"] <= rho <= k["max_weight"]
        case "cispo":
            return not 1 - k["clip_low"] <= w <= 1 + k["clip_high"]
        case "sft":
            return False
        case "topr":
            return adv <= 0 and not k["min_weight"] <= w <= k["max_weight"]
    raise AssertionError(name)


def bounds_of(k):
    low, high = 1 - k.get("clip_low", 1), 1 + k.get("clip_high", 0)
    return [b for b in (low, high, k.get("dual_clip"), k.get("min_weight"), k.get("max_weight")) if b]


CONSTANTS = st.fixed_dictionaries(
    {
        "clip_low": st.floats(0.05, 1),
        "clip_high": st.floats(0.05, 2),
        "dual_clip": st.none() | st.floats(1.5, 6),
        "min_weight": st.floats(0.1, 0.9),
        "max_weight": st.floats(1, 6),
    }
)


@pytest.mark.heavy
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20)
@given(
    logp=NATS, mu=NATS, prox=NATS, seq=NATS.map(lambda x: x + 4), adv=ADVANTAGES, mask=MASKS, given_constants=CONSTANTS
)
def test_loss_value_gradient_and_clipping_match_float64_numpy(name, logp, mu, prox, seq, adv, mask, given_constants):
    constants = {field: given_constants[field] for field in LOSS_CONSTANTS[name]}
    config = config_of(name, **constants)
    out, grad = run(logp, inputs_of(config, mu, adv, mask, prox=prox, seq=seq), config)
    k = {field: value for field, value in constants.items() if value is not None}
    for i in np.ndindex(SHAPE):
        if not mask[i]:
            assert out.loss[i] == 0 and grad[i] == 0 and not out.clipped[i]
            continue
        x, m, p, s, a = (float(v[i]) for v in (logp, mu, prox, seq, adv))
        ratios = math.exp(x - m), math.exp(p - m), math.exp(x - p), math.exp(s)

        def f(y, x=x, m=m, p=p, s=s, a=a):
            return objective(name, y, x, m, p, s, a, k)

        scale = 1 + abs(a) * max(ratios) * 8
        np.testing.assert_allclose(out.loss[i], -f(x), rtol=2e-5, atol=1e-6 * scale, err_msg=name)
        if any(abs(r / b - 1) < 1e-4 for r in ratios for b in bounds_of(k)):
            continue  # float32 and float64 may fall on different sides of the kink
        want = -(f(x + 1e-6) - f(x - 1e-6)) / 2e-6
        np.testing.assert_allclose(grad[i], want, rtol=2e-5, atol=1e-6 * scale, err_msg=name)
        if a:
            assert out.clipped[i] == was_clipped(name, *ratios, a, k), name


@pytest.mark.heavy
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    spread=st.floats(0.001, 1.0),
    low=st.floats(1e-3, 0.5),
    high=st.floats(1e-3, 0.5),
)
def test_gspo_mean_over_a_sequence_has_the_sequence_objectives_value_and_gradient(lengths, seed, spread, low, high):
    rng = np.random.default_rng(seed)
    logp, mu = (np.concatenate([rng.uniform(-3, 0, n) for n in lengths]) for _ in range(2))
    mu = logp + (mu - logp) * spread
    adv = np.array([rng.choice([-1.5, 2.0]) for _ in lengths])
    of = np.repeat(np.arange(len(lengths)), lengths)
    weight = 1 / np.array(lengths)[of]  # normalization=sequence

    def sequence_objective(x):  # GSPO, eq. 5 and 7
        total = 0.0
        for i, a in enumerate(adv):
            s = np.exp(np.mean((x - mu)[of == i]))
            total += min(s * a, float(np.clip(s, 1 - low, 1 + high)) * a)
        return total

    s = np.array([np.mean((logp - mu)[of == i]) for i in range(len(adv))])
    if np.any([np.abs(np.exp(s) / b - 1) < 1e-4 for b in (1 - low, 1 + high)]):
        return
    config = LossConfig(name="gspo", clip_low=low, clip_high=high)
    room = 20 - logp.size  # one shape, one compilation

    def padded(x):
        return np.pad(x, (0, room)).astype(np.float32)

    inputs = inputs_of(config, padded(mu), padded(adv[of]), padded(of + 1) > 0, seq=padded(s[of]))
    out, grad = run(padded(logp), inputs, config)
    loss, grad = out.loss[: logp.size], grad[: logp.size]
    steps = 1e-6 * np.eye(logp.size)
    want = [-(sequence_objective(logp + d) - sequence_objective(logp - d)) / 2e-6 for d in steps]
    np.testing.assert_allclose(np.sum(weight * loss), -sequence_objective(logp), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight * grad, want, rtol=1e-5, atol=1e-7)


@pytest.mark.heavy
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(
    logp=NATS,
    mu=NATS,
    ref=NATS,
    entropy=NATS,
    adv=ADVANTAGES,
    mask=MASKS,
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    kl_coef=st.floats(1e-3, 1),
    entropy_coef=st.sampled_from([0.01, 0.0, 0.3]),
)
def test_every_loss_adds_its_kl_and_entropy_terms(
    name, logp, mu, ref, entropy, adv, mask, estimator, kl_coef, entropy_coef
):
    plain = config_of(name)
    config = config_of(name, kl_coef=kl_coef, kl_estimator=estimator, entropy_coef=entropy_coef)
    base, base_grad = run(logp, inputs_of(plain, mu, adv, mask), plain)
    out, grad = run(logp, inputs_of(config, mu, adv, mask, ref=ref), config, entropy)
    x = logp.astype(np.float64) - ref  # log pi - log pi_ref; mu has no part in it
    value, slope = {
        "k1": (x, np.ones_like(x)),
        "k2": (x**2 / 2, x),
        "k3": (np.exp(-x) - 1 + x, 1 - np.exp(-x)),
    }[estimator]
    scale = 1e-5 * (1 + np.abs(base.loss).max() + np.abs(base_grad).max())
    np.testing.assert_allclose(out.kl, np.where(mask, value, 0), rtol=1e-5, atol=1e-6)
    want = base.loss + kl_coef * value - entropy_coef * entropy
    np.testing.assert_allclose(out.loss, np.where(mask, want, 0), rtol=1e-5, atol=scale)
    np.testing.assert_allclose(grad, np.where(mask, base_grad + kl_coef * slope, 0), rtol=1e-5, atol=scale)
    inputs = inputs_of(config, mu, adv, mask, ref=ref)
    entropy_grad = jax.grad(lambda h: token_loss(jnp.asarray(logp), h, inputs, config).loss.sum())
    np.testing.assert_allclose(entropy_grad(jnp.asarray(entropy)), np.where(mask, -entropy_coef, 0), rtol=1e-6)


def test_kl_is_reported_without_a_coefficient_and_is_no_part_of_the_loss():
    rng = np.random.default_rng(0)
    logp, mu, adv, ref = (rng.uniform(-3, 0, SHAPE).astype(np.float32) for _ in range(4))
    config = LossConfig()
    inputs = inputs_of(config, mu, adv)
    with_ref = TokenInputs(
        behavior_logprobs=inputs.behavior_logprobs,
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        reference_logprobs=jnp.asarray(ref),
    )
    (without, _), (out, _) = run(logp, inputs, config), run(logp, with_ref, config)
    np.testing.assert_array_equal(out.loss, without.loss)
    assert np.all(without.kl == 0)
    np.testing.assert_allclose(out.kl, np.where(MASK, np.expm1(ref - logp) + logp - ref, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.heavy
def test_k3_of_a_policy_far_below_the_reference_is_finite_and_still_pulls_back():
    config = LossConfig(kl_coef=1.0)
    far = np.array([-30.0, -1e4], np.float32)
    inputs = inputs_of(config, far, 0 * far, far < 0, ref=0 * far)
    out, grad = run(far, inputs, config)
    assert np.isfinite(out.loss).all() and out.loss[1] > out.loss[0] > 0
    np.testing.assert_allclose(grad, 1 - np.exp(MAX_LOG_RATIO) * np.ones(2), rtol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sign", [-1, 1])
def test_losses_extreme_ratios_stay_finite(name, sign, estimator):
    config = config_of(name, kl_coef=1.0, kl_estimator=estimator)
    zero, flipped = 0 * EXTREME, EXTREME[::-1]
    adv = np.full(SHAPE, sign, np.float32)
    for logp, mu, prox, ref in [
        (EXTREME, flipped, flipped, zero),
        (EXTREME, zero, EXTREME, flipped),
        (zero, EXTREME, zero, EXTREME),
        (flipped, EXTREME, zero, flipped),
        (1e9 * EXTREME, zero, EXTREME, zero),
    ]:
        out, grad = run(logp, inputs_of(config, mu, adv, prox=prox, ref=ref, seq=logp - mu), config)
        assert np.isfinite(out.loss).all() and np.isfinite(grad).all() and np.isfinite(out.kl).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_losses_masked_tokens_of_any_value_leak_nothing(name, junk):
    config = config_of(name, kl_coef=0.1, entropy_coef=0.1)
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(-3, 0, SHAPE).astype(np.float32) for _ in range(7)]

    def result(logp, mu, adv, prox, ref, seq, entropy):
        out, grad = run(logp, inputs_of(config, mu, adv, prox=prox, ref=ref, seq=seq), config, entropy)
        return *out, grad

    want = result(*arrays)
    got = result(*(np.where(MASK, x, np.float32(junk)) for x in arrays))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)
        assert np.all(g[~MASK] == 0)


@pytest.mark.parametrize("name", ["truncated_is", "cispo", "topr"])
def test_reinforce_weight_is_a_constant_of_the_gradient(name):
    # If the weight were differentiated, the gradient would be -w A (1 + log pi) = +w A here.
    one = np.ones((1, 1), np.float32)
    _, grad = run(-2 * one, inputs_of(LossConfig(name=name), -2 * one, one, one > 0), LossConfig(name=name))
    np.testing.assert_allclose(grad, [[-1.0]], rtol=1e-6)


def test_grpo_clip_negative_advantage_is_not_clipped_above_without_dual_clip():
    # A likely bad token is pushed down with its whole ratio, up to the float's safety cap.
    one = np.ones((1, 1), np.float32)
    inputs = inputs_of(LossConfig(), -3 * one, -one, one > 0)
    out, grad = run(0 * one, inputs, LossConfig())
    np.testing.assert_allclose(grad, [[np.exp(3.0)]], rtol=1e-6)
    assert not out.clipped.any() and MAX_LOG_RATIO > 3
    out, grad = run(0 * one, inputs, LossConfig(dual_clip=3.0))
    assert grad == 0 and out.clipped.all()
    np.testing.assert_allclose(out.loss, [[3.0]], rtol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["decoupled_ppo", "tis", "masked_is"])
def test_proximal_of_the_update_leaves_rho_times_the_policy_gradient(name):
    config = LossConfig(name=name)
    mu = np.log(np.array([0.5, 0.25, 0.125, 0.9], np.float32))
    logp = np.log(np.array([0.6, 0.2, 0.9, 0.3], np.float32))
    adv = np.array([1.0, -2.0, 1.0, 1.0], np.float32)
    cap = 5.0 if name == "decoupled_ppo" else 2.0
    rho = np.array([1.2, 0.8, 7.2, 1 / 3])
    weight = np.where((rho > 2) | (rho < 0.5), 0, rho) if name == "masked_is" else np.minimum(rho, cap)
    _, grad = run(logp, inputs_of(config, mu, adv, adv < 9, prox=logp), config)
    np.testing.assert_allclose(grad, -weight * adv, rtol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_take_any_shape_and_any_chunk_of_tokens(name, shape):
    config = config_of(name, kl_coef=0.1)
    rng = np.random.default_rng(2)
    arrays = [jnp.asarray(rng.uniform(-3, 0, shape), jnp.float32) for _ in range(6)]
    mask = jnp.asarray(rng.uniform(size=shape) < 0.8)

    def loss(arrays, mask):
        logp, mu, adv, prox, ref, seq = arrays
        return token_loss(logp, logp, inputs_of(config, mu, adv, mask, prox=prox, ref=ref, seq=seq), config)

    whole = loss(arrays, mask)
    flat = jax.vmap(loss)([x.ravel() for x in arrays], mask.ravel())
    for a, b in zip(whole, flat, strict=True):
        assert a.shape == shape
        np.testing.assert_allclose(a.ravel(), b, rtol=1e-6)


def test_needs_names_the_inputs_of_each_loss():
    proximal = {name for name in LOSSES if needs(config_of(name)).proximal}
    assert proximal == {"ppo_clip", "decoupled_ppo", "tis", "masked_is"}
    assert {name for name in LOSSES if needs(config_of(name)).sequence_ratio} == {"gspo"}
    assert needs(LossConfig(kl_coef=1e-3)) == Needs(False, True, False, False)
    assert needs(LossConfig()) == Needs(False, False, False, False)
    assert needs(LossConfig(teacher_coef=1.0, teacher_path="t")) == Needs(False, False, False, teacher=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LossConfig(name="tis"), "loss.name=tis needs TokenInputs.proximal_logprobs"),
        (LossConfig(name="gspo"), "loss.name=gspo needs TokenInputs.sequence_log_ratio"),
        (LossConfig(kl_coef=0.5), "loss.kl_coef=0.5 needs TokenInputs.reference_logprobs"),
    ],
)
def test_token_loss_missing_input_is_refused_by_name(config, said):
    x = jnp.zeros(SHAPE)
    inputs = TokenInputs(behavior_logprobs=x, advantages=x, loss_mask=jnp.asarray(MASK))
    with pytest.raises(ValueError, match=said):
        token_loss(x, x, inputs, config)


def test_token_loss_input_that_would_broadcast_is_refused():
    x = jnp.zeros(SHAPE)
    inputs = TokenInputs(behavior_logprobs=x, advantages=x[:, :1], loss_mask=jnp.asarray(MASK))
    with pytest.raises(ValueError, match=r"advantages: expected the logprobs' shape \(2, 5\), got \(2, 1\)"):
        token_loss(x, x, inputs, LossConfig())


def test_losses_registry_and_config_have_the_same_names():
    assert set(LOSSES) == set(LOSS_CONSTANTS)
    assert {c for constants in LOSS_CONSTANTS.values() for c in constants} == set(CUSTOM_LOSS.constants)
