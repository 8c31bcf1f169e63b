"""The fused step of AdamW against optax's chain, which is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.sections import OptimizerConfig
from learner.update.optimizer import adamw_step, clip_scale, make_optimizer, rounding_words

NUM_STEPS = 6


def tree(key, scale=1.0):
    shapes = {"layers": {"q_proj": {"kernel": (3, 8, 5), "bias": (3, 8)}, "norm": {"scale": (3, 5)}}, "head": (7, 5)}
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([scale * jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)])


def fused(config, params, sums, opt_state, *, share, is_good=True):
    norm = optax.tree.norm(sums) * share
    return jax.jit(adamw_step, static_argnames=("config", "num_steps"))(
        params,
        sums,
        opt_state,
        scale=share * clip_scale(norm, config.max_grad_norm),
        num_steps=NUM_STEPS,
        is_good=jnp.asarray(is_good),
        config=config,
        words=rounding_words((params, opt_state), seed=0, step=jnp.int32(0), epoch=jnp.int32(0)),
    )


@pytest.mark.heavy
@pytest.mark.parametrize("scale", [1e-4, 30.0], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_adamw_step_is_the_optax_chains(scale, schedule):
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, schedule=schedule, max_grad_norm=0.7)
    chain = make_optimizer(config, num_steps=NUM_STEPS)
    want = got = tree(jax.random.key(0))
    want_state = got_state = chain.init(want)
    for count in range(NUM_STEPS - 1):
        sums, share = tree(jax.random.key(count + 1), scale), np.float32(1 / 37)
        updates, want_state = chain.update(jax.tree.map(lambda g, w=share: g * w, sums), want_state, want)
        want = optax.apply_updates(want, updates)
        got, got_state, zeros = fused(config, got, sums, got_state, share=share)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6), got, want)
        assert all(not np.any(z) and z.dtype == np.float32 for z in jax.tree.leaves(zeros))
    assert jax.tree.structure(got_state) == jax.tree.structure(want_state)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got_state, want_state)
    assert jax.tree.map(lambda x: x.dtype, got_state) == jax.tree.map(lambda x: x.dtype, want_state)


@pytest.mark.heavy
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_adamw_step_that_is_not_good_hands_back_the_same_bits_and_empties_the_sums(bad):
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, mu_dtype="bfloat16", nu_dtype="bfloat16")
    chain = make_optimizer(config, num_steps=NUM_STEPS)
    params = tree(jax.random.key(0))
    _, state, _ = fused(config, params, tree(jax.random.key(1)), chain.init(params), share=np.float32(1))
    sums = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(bad), tree(jax.random.key(2)))
    got, got_state, zeros = fused(config, params, sums, state, share=np.float32(1), is_good=False)
    jax.tree.map(np.testing.assert_array_equal, (got, got_state), (params, state))
    jax.tree.map(lambda z: np.testing.assert_array_equal(z, np.zeros(z.shape, np.float32)), zeros)


def test_adamw_step_in_place_copies_no_array_of_the_parameters_size():
    config = OptimizerConfig(weight_decay=0.1)
    params = {"kernel": jnp.ones((512, 512))}
    chain = make_optimizer(config, num_steps=NUM_STEPS)

    def step(params, state, sums):
        one = jnp.float32(1)
        settings = {"num_steps": NUM_STEPS, "config": config, "words": words}
        return adamw_step(params, sums, state, scale=one, is_good=one > 0, **settings)

    arguments = params, chain.init(params), params
    words = rounding_words(arguments[:2], seed=0, step=jnp.int32(0), epoch=jnp.int32(0))
    text = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*arguments).compile().as_text() or ""
    assert "f32[512,512]" in text
    assert not [line for line in text.splitlines() if "= f32[512,512]" in line and " copy(" in line]
