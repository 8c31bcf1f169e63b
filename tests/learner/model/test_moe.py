import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.model.moe import ExpertLayout, experts_mlp, grouped_matmul, megablox, moe_mlp, ragged, route
from tests.learner import eight_devices

EXPERTS, DIM, WIDTH = 5, 6, 4


def example(seed, num_tokens=9):
    rng = np.random.default_rng(seed)
    kernels = tuple(rng.normal(size=s) for s in ((EXPERTS, WIDTH, DIM), (EXPERTS, WIDTH, DIM), (EXPERTS, DIM, WIDTH)))
    return rng.normal(size=(num_tokens, DIM)), rng.normal(size=(EXPERTS, DIM)), kernels


def oracle(x, is_real, router, kernels, num_per_token, normalize):
    """Token by token, expert by expert, in float64."""
    out, (gate, up, down) = np.zeros_like(x), kernels
    for i in np.flatnonzero(is_real):
        scores = np.exp(router @ x[i])
        probabilities = scores / scores.sum()
        chosen = np.argsort(-probabilities)[:num_per_token]
        total = probabilities[chosen].sum() if normalize else 1.0
        for e in chosen:
            g = gate[e] @ x[i]
            out[i] += probabilities[e] / total * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[i])))
    return out


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


@jax.jit(static_argnums=(4, 5))
def compiled(x, is_real, router, kernels, num_per_token, normalize):
    return moe_mlp(
        x, is_real, router, kernels, num_per_token=num_per_token, normalize=normalize, layout=ExpertLayout(), mesh=None
    )


@pytest.mark.heavy
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), k=st.sampled_from([1, 3, EXPERTS]), normalize=st.booleans(), fill=st.floats(0, 1))
def test_moe_mlp_equals_float64_loops(seed, k, normalize, fill):
    x, router, kernels = example(seed)
    is_real = np.random.default_rng(seed + 1).random(len(x)) < fill
    got = compiled(*float32((x,)), is_real, *float32((router, kernels)), k, normalize)
    want = oracle(x, is_real, router, kernels, k, normalize)
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))
    assert not np.asarray(got)[~is_real].any()


def test_route_weights_are_the_largest_probabilities_in_float32():
    x, router, _ = example(3)
    logits = x @ router.T
    want = np.sort(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), -1)[:, ::-1][:, :2]
    for normalize, expected in ((False, want), (True, want / want.sum(-1, keepdims=True))):
        weights, experts = route(*float32((x, router)), num_per_token=2, normalize=normalize)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
        np.testing.assert_array_equal(experts, np.argsort(-logits, -1)[:, :2])
    half, _ = route(
        *jax.tree.map(lambda a: a.astype(jnp.bfloat16), float32((x, router))), num_per_token=2, normalize=True
    )
    assert half.dtype == jnp.float32


def replayed_oracle(x, router, kernels, given, normalize):
    """The layer with given experts, and of the sum of its squares the router's gradient; in float64, by hand."""
    out, (gate, up, down), d_router = np.zeros_like(x), kernels, np.zeros_like(router)
    for i, token in enumerate(x):
        scores = np.exp(router @ token)
        p = scores / scores.sum()
        chosen = given[i] if given[i, 0] >= 0 else np.argsort(-p)[: given.shape[1]]
        values = np.stack(
            [down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ token)) for e in chosen for g in [gate[e] @ token]]
        )
        total = p[chosen].sum() if normalize else 1.0
        out[i] = p[chosen] / total @ values
        d_weights = 2 * values @ out[i]
        # dw_j / dz_m is w_j (delta_jm - w_m) for chosen m with normalize, else p_j (delta_jm - p_m).
        d_logits = np.zeros(len(p))
        weights = p[chosen] / total
        d_logits[chosen] += d_weights * weights
        d_logits -= (weights @ d_weights) * (np.bincount(chosen, weights, len(p)) if normalize else p)
        d_router += np.outer(d_logits, token)
    return out, d_router


@pytest.mark.parametrize("normalize", [True, False])
def test_replayed_experts_have_the_own_routers_weights_and_give_it_the_gradient(normalize):
    x, router, kernels = example(4)
    rng = np.random.default_rng(4)
    given = np.stack([rng.permutation(EXPERTS)[:2] for _ in x])
    given[::3] = -1  # not captured
    want, d_router = replayed_oracle(x, router, kernels, given, normalize)

    def layer(router):
        replay = jnp.asarray(given, jnp.int16)
        options: dict[str, Any] = dict(num_per_token=2, normalize=normalize, layout=ExpertLayout(), mesh=None)
        is_real = jnp.ones(len(x), bool)
        out = moe_mlp(float32(x), is_real, router, float32(kernels), replayed=replay, **options)
        return (out**2).sum(), out

    (_, got), gradient = jax.value_and_grad(layer, has_aux=True)(*float32((router,)))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(gradient, d_router, atol=1e-4 * np.abs(d_router).max())
    own = oracle(x, np.ones(len(x), bool), router, kernels, 2, normalize)
    np.testing.assert_allclose(np.asarray(got)[::3], own[::3], atol=1e-5 * np.abs(want).max())
    assert np.abs(want - own).max() > 0.1


@pytest.mark.heavy
def test_experts_mlp_in_steps_equals_one_step_with_gradients():
    x, _, kernels = float32(example(5))
    rng = np.random.default_rng(6)
    weights = jnp.asarray(rng.random((9, 2)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=4)
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(x, weights, kernels, experts, steps):
        return jnp.sin(experts_mlp(x, weights, experts, kernels, num_steps=steps)).sum()

    # Most pairs belong to other devices, so that later steps have nothing to do, or all to this one.
    for experts in (rng.integers(-4, 9, (9, 2)), np.zeros((9, 2), int), np.full((9, 2), -1)):
        one, many = (gradient(x, weights, kernels, experts, n) for n in (1, 9))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1, float(jnp.abs(a).max())))


def test_experts_mlp_in_steps_keeps_no_copy_a_step_for_backward():
    x, _, kernels = float32(example(5))
    weights, experts = jnp.ones((9, 2)), jnp.zeros((9, 2), int)

    def total(x, kernels):
        return experts_mlp(x, weights, experts, kernels, num_steps=9).sum()

    text = str(jax.make_jaxpr(jax.grad(total, (0, 1)))(x, kernels))
    assert "f32[9,6]" in text  # the printed shapes are these; 8 steps follow the first
    assert "f32[8,9,6]" not in text and f"f32[8,{EXPERTS},{WIDTH},{DIM}]" not in text


EIGHT_DEVICES = """
import glob, jax, jax.numpy as jnp, numpy as np, re, sys
from bridge.param_names import flatten, unflatten
from learner.distributed.sharding import batch_sharding, make_mesh, param_shardings
from learner.model.architecture import Architecture
from learner.model.decoder import init_params, make_apply

SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False, max_position_embeddings=64, qkv_bias=False,
    o_bias=False)
MODELS = dict(
    dense=Architecture(model_type="qwen3", **SHAPE),
    moe=Architecture(model_type="qwen3_moe", **SHAPE, num_experts=8,
    num_experts_per_token=3, moe_intermediate_size=16, norm_topk_prob=True))
rng = np.random.default_rng(0)
tokens = rng.integers(0, 64, (8, 16)).astype(np.int32)
segments = np.repeat([[1] * 6 + [2] * 7 + [0] * 3], 8, 0).astype(np.int32)
positions = np.repeat([[*range(6), *range(7), 0, 0, 0]], 8, 0).astype(np.int32)
weights = (rng.normal(size=(8, 16, 32)) * (segments > 0)[..., None]).astype(np.float32)
batch = (tokens, positions, segments, weights)

def rng_routed(config):
    # Half of the tokens have replayed experts, the others route themselves.
    chosen = np.argsort(np.random.default_rng(1).random((8, 16, 2, config.num_experts)))[..., :3].astype(np.int16)
    return np.where(np.arange(16)[:, None, None] % 2, chosen, -1).astype(np.int16)

def step(config, mesh, dtype=jnp.float32):
    apply = make_apply(config, mesh=mesh, compute_dtype=dtype, attention_path="xla", attention_block=8)
    routed = rng_routed(config) if config.num_experts else None
    def loss(params, tokens, positions, segments, weights):
        hidden = apply(params, tokens, positions, segments, None, routed)
        return (hidden.astype(jnp.float32) * weights).sum(), hidden
    grad = jax.value_and_grad(loss, has_aux=True)
    if mesh is None:
        return jax.jit(grad)
    shardings, rows = param_shardings(params, mesh), batch_sharding(mesh)
    return jax.jit(grad, in_shardings=(shardings, rows, rows, rows, rows), out_shardings=((None, None), shardings))

for name, sizes in CASES:
    config = MODELS[name]
    fresh = flatten(jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)))
    params = unflatten({p: np.asarray(x if "scale" in p else x * 5) for p, x in fresh.items()})
    if DUMP:
        step(config, make_mesh(**sizes), jnp.bfloat16).lower(params, *batch).compile()
        continue
    (_, want_hidden), want = step(config, None)(params, *batch)
    (_, hidden), got = step(config, make_mesh(**sizes))(params, *batch)
    real = segments > 0
    np.testing.assert_allclose(np.asarray(hidden)[real], np.asarray(want_hidden)[real], atol=1e-5)
    want = flatten(want)
    assert min(float(np.abs(w).max()) for p, w in want.items() if p != "lm_head/kernel") > 1e-3
    for path, leaf in flatten(got).items():
        scale = max(1, float(np.abs(want[path]).max()))
        np.testing.assert_allclose(leaf, want[path], atol=1e-5 * scale, err_msg=f"{name} {sizes} {path}")
    print("equal on", name, sizes)
"""


def run_on_eight_devices(cases, *, xla_flags="", dump=False):
    code = f"CASES, DUMP = {cases!r}, {dump}\n{EIGHT_DEVICES}"
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # what is not compiled is not dumped
    return eight_devices.run(code, xla_flags=xla_flags, environment=environment).splitlines()


@pytest.mark.integration
@pytest.mark.nightly  # daily: learner/update/test_sharded_steps.py, whose updates are compared on meshes with all axes
def test_forward_and_gradient_on_eight_devices_equal_one_device():
    cases = [
        ("moe", dict(expert=4, fsdp=2)),
        ("moe", dict(expert=2, tensor=2, fsdp=2)),
        ("moe", dict(data=2, expert=2, sequence=2)),
        ("dense", dict(fsdp=2, sequence=2, tensor=2)),
    ]
    assert run_on_eight_devices(cases) == [f"equal on {name} {sizes}" for name, sizes in cases]


@pytest.mark.integration
@pytest.mark.parametrize("name,sizes", [("dense", dict(fsdp=4, tensor=2)), ("moe", dict(fsdp=2, expert=2, tensor=2))])
def test_fsdp_gathers_kernels_in_the_compute_dtype_and_never_the_embedding(name, sizes, tmp_path):
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_pass_re=spmd-partitioning"
    run_on_eight_devices([(name, sizes)], xla_flags=flags, dump=True)
    # Before the CPU backend turns bfloat16 into float32, which an accelerator's doesn't.
    (after,) = tmp_path.glob("*jit_loss*after_spmd-partitioning*")
    gathered = [line.split("=", 1)[1].split()[0] for line in after.read_text().splitlines() if " all-gather(" in line]
    assert len(gathered) >= 7
    wide = [shape for shape in gathered if not shape.startswith(("bf16", "s32", "pred"))]
    # Only the router's weights of each token, [tokens, k], cross the wire in float32.
    assert all(shape.startswith("f32[64,3]") for shape in wide), wide
    assert not any("[64,32]" in shape for shape in gathered if name == "dense"), gathered


SIZES = {"even": [8, 8, 8], "one empty": [13, 0, 7], "rows left over": [5, 3, 1], "none": [0, 0, 0]}


def interpreted(rows, kernels, sizes):
    return megablox(rows, kernels, sizes, tile=(16, 128, 128), interpret=True)


@pytest.mark.heavy
@pytest.mark.parametrize("multiply", [ragged, interpreted], ids=["ragged", "megablox"])
@pytest.mark.parametrize("name", SIZES)
def test_grouped_matmul_values_and_gradients_equal_a_loop_over_the_groups(name, multiply):
    rng, sizes = np.random.default_rng(0), np.array(SIZES[name], np.int32)
    rows, kernels, d_out = (
        rng.normal(size=shape).astype(np.float32) for shape in [(24, 128), (3, 256, 128), (24, 256)]
    )
    d_out[sizes.sum() :] = 0  # what is after the last run is not used
    out, pullback = jax.vjp(lambda r, k: multiply(r, k, sizes), rows, kernels)
    d_rows, d_kernels = pullback(jax.numpy.asarray(d_out))
    start = 0
    for e, size in enumerate(sizes):
        here = slice(start, start + size)
        np.testing.assert_allclose(out[here], rows[here] @ kernels[e].T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(d_rows[here], d_out[here] @ kernels[e], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(d_kernels[e], d_out[here].T @ rows[here], rtol=1e-4, atol=1e-4)
        start += size


def test_grouped_matmul_is_the_kernel_on_a_tpu_and_xlas_operation_elsewhere():
    assert grouped_matmul("tpu") is megablox and grouped_matmul("cpu") is grouped_matmul("gpu") is ragged
