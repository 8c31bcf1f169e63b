"""Parameters in bfloat16 move as exact arithmetic moves them: Adam in float64 numpy is the oracle."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from configs.sections.model import Dtype, OptimizerConfig
from learner.update.optimizer import (
    ApplyUpdate,
    adamw_step,
    init_state,
    make_optimizer,
    round_stochastically,
    rounding_words,
)
from tests.learner import eight_devices
from tests.learner.streams import config_of, fresh_params, pack, random_groups, steps_of

WORDS = jnp.array([3, 5], jnp.uint32)
NUM_UPDATES = 30


def neighbors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of bfloat16 around each x, toward zero and away from it, by an integer's arithmetic."""
    toward = (x.view(np.uint32) >> 16).astype(np.uint16)
    low, high = (h.view(ml_dtypes.bfloat16).astype(np.float64) for h in (toward, toward + np.uint16(1)))
    return low, high


def test_round_stochastically_gives_a_neighbor_with_the_exact_mean():
    values = np.array([1e-6, -0.02, 0.999999, 3.14159, -1e4, 65537.0, 1e-39], np.float32)
    x = np.repeat(values[:, None], 20_000, axis=1)
    got = np.asarray(round_stochastically(jnp.asarray(x), "bfloat16", WORDS)).astype(np.float64)
    toward, away = neighbors(values)
    for row, low, high, value in zip(got, toward, away, values.astype(np.float64), strict=True):
        assert set(row) <= {low, high}
        share = (value - low) / (high - low)
        assert abs(np.mean(row == high) - share) < 5 * np.sqrt(share * (1 - share) / row.size) + 1e-4


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -(2.0**-126), np.inf, -np.inf, np.nan])
def test_round_stochastically_keeps_what_bfloat16_holds(value):
    x = np.full(1000, value, np.float32)
    got = np.asarray(round_stochastically(jnp.asarray(x), "bfloat16", WORDS)).astype(np.float32)
    np.testing.assert_array_equal(got, x)
    assert np.all(np.signbit(got) == np.signbit(x)) or np.isnan(value)


def test_rounding_bits_are_uniform_and_of_neighbors_steps_and_leaves_independent():
    x = jnp.full((64, 256), 1 + 2.0**-8, jnp.float32)  # halfway between its neighbors

    def ups(words):
        return np.asarray(round_stochastically(x, "bfloat16", words)).astype(np.float32) > 1

    tree = {"a": x, "b": x}
    first, second = (rounding_words(tree, seed=1, step=jnp.int32(s), epoch=jnp.int32(0)) for s in (4, 5))
    pass_1 = rounding_words(tree, seed=1, step=jnp.int32(4), epoch=jnp.int32(1))
    seed_2 = rounding_words(tree, seed=2, step=jnp.int32(4), epoch=jnp.int32(0))
    base = ups(first["a"])
    bound = 5 * 0.5 / np.sqrt(base.size)
    leaves = (first["b"], second["a"], pass_1["a"], seed_2["a"])
    others = (np.roll(base, 1, 1), np.roll(base, 1, 0), *map(ups, leaves))
    for other in others:
        assert abs(other.mean() - 0.5) < bound
        assert abs(np.mean(base == other) - 0.5) < bound


def test_rounding_words_are_a_function_of_seed_step_and_pass():
    tree = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    words = [
        rounding_words(tree, seed=seed, step=jnp.int32(step), epoch=jnp.int32(epoch))
        for seed, step, epoch in ((0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    jax.tree.map(np.testing.assert_array_equal, words[0], words[1])
    distinct = {np.asarray(leaf).tobytes() for tree in words for leaf in jax.tree.leaves(tree)}
    assert len(distinct) == 2 * 4


def numpy_adam(params, grads, config):
    """Adam by Kingma and Ba's algorithm 1, in float64."""
    p, m, v = params.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(grads.astype(np.float64), 1):
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        p = p - config.learning_rate * m / (1 - config.beta1**t) / (np.sqrt(v / (1 - config.beta2**t)) + config.eps)
    return p


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("learning_rate", [1e-6, 3e-5])
def test_adamw_in_bfloat16_moves_parameters_as_exact_arithmetic_does(learning_rate, beta2):
    """Rounded to the nearest, not one in a hundred moves at 1e-6, and the oracle's movement is missed by all of it."""
    config = OptimizerConfig(learning_rate=learning_rate, beta2=beta2)
    rng = np.random.default_rng(0)
    shape = (200, 500)
    start = rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)
    # A direction that stays, noise around it, and gradients that become small: old squares must be forgotten.
    drift = rng.normal(0, 1, shape)
    grads = [(drift + rng.normal(0, 1, shape)) * 0.9**t for t in range(NUM_UPDATES)]
    want = numpy_adam(start, np.array(grads, np.float32), config)
    params: Any = {"kernel": jnp.asarray(start)}
    state: Any = make_optimizer(config, num_steps=NUM_UPDATES).init(params)
    step = jax.jit(adamw_step, static_argnames=("config", "num_steps"))
    for t, g in enumerate(grads):
        params, state, _ = step(
            params,
            {"kernel": jnp.asarray(g, jnp.float32)},
            state,
            scale=jnp.float32(1),
            num_steps=NUM_UPDATES,
            is_good=jnp.bool_(True),
            config=config,
            words=rounding_words((params, state), seed=0, step=jnp.int32(t), epoch=jnp.int32(0)),
        )
    got = np.asarray(params["kernel"]).astype(np.float64)
    moved, exact = got - start.astype(np.float64), want - start.astype(np.float64)
    # Each rounding errs by less than a gap, with mean 0 and a variance of at most step x gap.
    gap = np.abs(start.astype(np.float64)) * 2.0**-7
    deviation = np.sqrt(np.sum(exact**2 * NUM_UPDATES * learning_rate * 2 * gap)) / np.sum(exact**2)
    part = np.sum(moved * exact) / np.sum(exact**2)
    assert abs(part - 1) < 5 * deviation < 0.6
    # The same for each size of weight: no weight stands still because it is large.
    sizes = np.abs(start.astype(np.float64))
    for low, high in ((0, 0.01), (0.01, 0.03), (0.03, 1)):
        where = (sizes >= low) & (sizes < high)
        of_size = np.sum(moved[where] * exact[where]) / np.sum(exact[where] ** 2)
        assert abs(of_size - 1) < 5 * deviation * np.sqrt(sizes.size / where.sum()) * 2


@pytest.mark.heavy
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_apply_update_in_bfloat16_moves_as_the_same_in_float32(optimizer):
    config = OptimizerConfig(name=optimizer, learning_rate=1e-5, weight_decay=0.1)
    rng = np.random.default_rng(0)
    begin = rng.normal(0, 0.02, (2, 128, 384)).astype(ml_dtypes.bfloat16)
    drift = rng.normal(0, 1, begin.shape)
    grads = [np.asarray(drift + rng.normal(0, 1, drift.shape), np.float32) for _ in range(NUM_UPDATES)]
    moved = {}

    def tree_of(kernel: Any) -> Any:
        return {"layers": {"q_proj": {"kernel": kernel}}}

    for dtype in ("float32", "bfloat16"):
        chain = make_optimizer(config, num_steps=NUM_UPDATES)
        update = ApplyUpdate(optimizer=chain, config=config, epochs=1, num_steps=NUM_UPDATES, seed=0)
        apply = jax.jit(update)
        state = init_state(tree_of(jnp.asarray(begin, dtype)), chain)
        for g in grads:
            total = dataclasses.replace(state.accumulator, grads=tree_of(jnp.asarray(g)), denominator=jnp.float32(1))
            state, _ = apply(dataclasses.replace(state, accumulator=total), jnp.int32(0))
        (kernel,) = jax.tree.leaves(state.params)
        assert kernel.dtype == dtype
        assert {x.dtype for x in jax.tree.leaves(state.opt_state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
        moved[dtype] = np.asarray(kernel).astype(np.float64) - begin.astype(np.float64)
    exact = moved["float32"]
    assert abs(np.sum(exact * moved["bfloat16"]) / np.sum(exact**2) - 1) < 0.03


LONG = 3000


def test_moments_in_bfloat16_follow_float64_over_a_long_stream_as_the_nearest_number_would_not():
    """Squares that grow by less than half a gap per step, and then decay by less: rounded to the nearest they stand."""
    config = OptimizerConfig(learning_rate=1e-4, beta1=0.99, beta2=0.999, mu_dtype="bfloat16", nu_dtype="bfloat16")
    shape = (24, 24)
    sizes = np.where(np.arange(LONG) < LONG // 2, 1.0, 0.01)
    grads = (np.random.default_rng(0).normal(0.3, 1, (LONG, *shape)) * sizes[:, None, None]).astype(np.float32)
    params: Any = {"kernel": jnp.zeros(shape)}
    state: Any = make_optimizer(config, num_steps=LONG).init(params)

    def step(carry: Any, item: Any) -> Any:
        (params, state), (t, g) = carry, item
        words = rounding_words((params, state), seed=0, step=t, epoch=jnp.int32(0))
        options = dict(scale=jnp.float32(1), num_steps=LONG, is_good=jnp.bool_(True), config=config, words=words)
        params, state, _ = adamw_step(params, {"kernel": g}, state, **options)
        return (params, state), (state[1].nu["kernel"], params["kernel"])

    _, (got, moved) = jax.jit(lambda *xs: jax.lax.scan(step, (params, state), xs))(jnp.arange(LONG), grads)
    exact, nearest = np.zeros(shape), np.zeros(shape, ml_dtypes.bfloat16)
    for t, g in enumerate(grads.astype(np.float64)):
        exact = config.beta2 * exact + (1 - config.beta2) * g**2
        nearest = (config.beta2 * nearest.astype(np.float64) + (1 - config.beta2) * g**2).astype(ml_dtypes.bfloat16)
        if t in (LONG // 2 - 1, LONG - 1):
            ratio = np.asarray(got[t]).astype(np.float64) / exact
            assert abs(ratio.mean() - 1) < 0.02 and ratio.std() < 0.15
            assert np.mean(nearest.astype(np.float64) / exact) > 1.1
    want = numpy_adam(np.zeros(shape), grads, config)
    assert abs(np.sum(np.asarray(moved[-1]) * want) / np.sum(want**2) - 1) < 0.01
    np.testing.assert_allclose(moved[-1], want, atol=0.06 * np.abs(want).max())


@pytest.mark.heavy
def test_thirty_updates_of_a_model_in_bfloat16_learn_as_in_float32_and_resume():
    start = jax.tree.map(lambda p: np.asarray(p, ml_dtypes.bfloat16), fresh_params())
    moved, gained = {}, {}
    dtypes: dict[str, tuple[Dtype, Dtype]] = {
        "float32": ("float32", "float32"),
        "parameters": ("bfloat16", "float32"),
        "moments": ("float32", "bfloat16"),
    }
    for what, (dtype, moments) in dtypes.items():
        config: Any = config_of(param_dtype=dtype, rows=4, row_tokens=32)
        optimizer = OptimizerConfig(learning_rate=1e-4, beta2=0.999, mu_dtype=moments, nu_dtype=moments)
        config = dataclasses.replace(config, optimizer=optimizer)
        steps = steps_of(config)
        state, losses, kept = steps.init(jax.tree.map(lambda p, d=dtype: p.astype(d), start)), [], []
        for n in range(NUM_UPDATES):
            kept = jax.tree.map(np.asarray, state)
            for micro in pack(config, random_groups(n % 2, 3)):
                state = steps.accumulate(state, micro.batch)
            state, metrics = steps.apply(state)
            losses.append(float(metrics["loss"]))
        # From what was kept before the last update, as from a checkpoint: the same bits again.
        state_again = jax.tree.map(lambda like, x: jax.device_put(x, like.sharding), steps.abstract_state(), kept)
        for micro in pack(config, random_groups((NUM_UPDATES - 1) % 2, 3)):
            state_again = steps.accumulate(state_again, micro.batch)
        again, _ = steps.apply(state_again)
        jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
        difference = jax.tree.map(
            lambda a, b: (np.asarray(a, np.float64) - np.asarray(b, np.float64)).ravel(), state.params, start
        )
        moved[what] = np.concatenate(jax.tree.leaves(difference))
        gained[what] = np.mean(losses[:2]) - np.mean(losses[-2:])
    exact = moved["float32"]
    assert gained["float32"] > 0
    for what, error, share in (("parameters", 0.2, 0.25), ("moments", 0.05, 0.1)):
        assert abs(np.sum(exact * moved[what]) / np.sum(exact**2) - 1) < error
        assert abs(gained[what] / gained["float32"] - 1) < share


@pytest.mark.heavy
def test_rounding_is_the_same_on_every_mesh():
    code = """
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from learner.update.optimizer import round_stochastically
x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8, 4)).astype(np.float32))
words = jnp.array([3, 5], jnp.uint32)
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
f = lambda x: round_stochastically(x, "bfloat16", words)
want = np.asarray(jax.jit(f)(x)).view(np.uint16)
for spec in (P("a"), P(None, "b"), P(("a", "b")), P("b", "a")):
    got = jax.jit(f, out_shardings=NamedSharding(mesh, spec))(jax.device_put(x, NamedSharding(mesh, spec)))
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want)
print("same", (want != 0).any())
"""
    assert eight_devices.run(code) == "same True\n"
