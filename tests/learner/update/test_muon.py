"""Muon against float64 numpy, written by its papers; on a mesh; and which parameters it steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bridge.param_names import flatten, unflatten
from configs.sections import LoraConfig, OptimizerConfig
from learner.distributed.sharding import make_mesh, param_shardings
from learner.model.decoder import abstract_params
from learner.model.lora import abstract_adapters
from learner.update.muon import is_matrix
from learner.update.optimizer import ApplyUpdate, init_state, make_optimizer
from tests.learner import eight_devices
from tests.learner.streams import MODEL, NumpyAdamW, model_of

SHAPES = {
    "layers/q_proj/kernel": (3, 12, 8),
    "layers/o_proj/kernel": (3, 8, 12),
    "layers/experts_down/kernel": (3, 2, 8, 6),
    "layers/q_proj/lora_a": (3, 2, 8),
    "layers/q_proj/bias": (3, 12),
    "layers/router/kernel": (3, 2, 8),
    "layers/input_norm/scale": (3, 8),
    "embed/embedding": (10, 8),
    "lm_head/kernel": (10, 8),
}
MATRICES = list(SHAPES)[:4]
CONFIG = OptimizerConfig(
    name="muon",
    learning_rate=0.03,
    momentum=0.9,
    weight_decay=0.2,
    max_grad_norm=0.7,
    warmup_steps=2,
    schedule="linear",
)
NUM_STEPS = 6


def arrays(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: (scale * rng.normal(size=shape)).astype(np.float32) for path, shape in SHAPES.items()}


def orthogonalized(x: np.ndarray, eps: float) -> np.ndarray:
    """Newton-Schulz of one matrix, as Jordan's post of 2024 writes it."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (np.sqrt((x**2).sum()) + eps)
    for _ in range(5):
        s = x @ x.T
        x = a * x + b * s @ x + c * s @ s @ x
    return x


class NumpyMuon:
    """Algorithm 1 of Liu et al., 2025, in float64, matrix by matrix; AdamW for what is no matrix."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.c, self.momentum = config, {path: np.zeros(SHAPES[path]) for path in MATRICES}
        self.adam = NumpyAdamW(dataclasses.replace(config, max_grad_norm=1e9))

    def update(self, params: dict[str, Any], grads: dict[str, Any], rate: float) -> dict[str, Any]:
        c = self.c
        grads = {k: np.asarray(g, np.float64) for k, g in grads.items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        grads = {k: g * min(1.0, c.max_grad_norm / norm) for k, g in grads.items()}
        rest = [k for k in params if k not in MATRICES]
        out = self.adam.update({k: params[k] for k in rest}, {k: grads[k] for k in rest}, rate)
        for k in MATRICES:
            self.momentum[k] = c.momentum * self.momentum[k] + grads[k]
            nesterov = grads[k] + c.momentum * self.momentum[k]
            step = np.empty(nesterov.shape)
            for index in np.ndindex(*nesterov.shape[:-2]):
                step[index] = 0.2 * max(nesterov.shape[-2:]) ** 0.5 * orthogonalized(nesterov[index], c.eps)
            out[k] = params[k] - rate * (step + c.weight_decay * params[k])
        return out


@pytest.mark.heavy
@pytest.mark.parametrize("scale", [1e-3, 10.0], ids=["not clipped", "clipped"])
def test_muon_is_the_papers_in_float64_for_each_matrix_of_stacked_kernels(scale):
    optimizer, oracle = make_optimizer(CONFIG, num_steps=NUM_STEPS), NumpyMuon(CONFIG)
    want: dict[str, Any] = {k: x.astype(np.float64) for k, x in arrays(0).items()}
    got: Any = jax.tree.map(jnp.asarray, unflatten(arrays(0)))
    state, update = optimizer.init(got), jax.jit(optimizer.update)
    for i in range(NUM_STEPS):
        grads = arrays(i + 1, scale)
        updates, state = update(unflatten(grads), state, got)
        got = optax.apply_updates(got, updates)
        rate = 0.03 * min(1, (i + 1) / 2) * (1 - max(i - 2, 0) / 4)
        want = oracle.update(want, grads, rate)
        for path, x in flatten(got).items():
            np.testing.assert_allclose(x, want[path], rtol=1e-5, atol=1e-5, err_msg=path)


def test_muon_steps_the_matrices_of_layers_alone():
    moe = model_of(
        "qwen3_moe", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    )

    def matrices(tree: Any) -> set[str]:
        return {path.removeprefix("layers/") for path in flatten(tree) if is_matrix(path)}

    attention = {f"{name}_proj/kernel" for name in "qkvo"}
    assert matrices(abstract_params(MODEL)) == attention | {f"{name}_proj/kernel" for name in ("gate", "up", "down")}
    assert matrices(abstract_params(moe)) == attention | {f"experts_{name}/kernel" for name in ("gate", "up", "down")}
    adapters = abstract_adapters(MODEL, LoraConfig(rank=2))
    assert len(matrices(adapters)) == len(flatten(adapters)) > 0


def update_of(config: OptimizerConfig, mesh: Any = None) -> ApplyUpdate:
    chain = make_optimizer(config, num_steps=NUM_STEPS, mesh=mesh)
    return ApplyUpdate(optimizer=chain, config=config, epochs=1, num_steps=NUM_STEPS, seed=0)


def with_grads(state: Any, grads: dict[str, np.ndarray]) -> Any:
    total = dataclasses.replace(state.accumulator, grads=unflatten(grads), denominator=jnp.float32(1))
    return dataclasses.replace(state, accumulator=total)


@pytest.mark.heavy
def test_muon_update_that_is_not_finite_keeps_all_bits_and_a_zero_gradient_moves_no_matrix():
    config = OptimizerConfig(name="muon", learning_rate=0.01, mu_dtype="bfloat16", nu_dtype="bfloat16")
    update = update_of(config)
    apply = jax.jit(update)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), unflatten(arrays(0)))
    first, _ = apply(with_grads(init_state(params, update.optimizer), arrays(1)), jnp.int32(0))
    assert {str(x.dtype) for x in jax.tree.leaves(first.opt_state) if x.ndim} == {"bfloat16"}
    bad = arrays(2)
    bad["layers/q_proj/kernel"][0, 0, 0] = np.nan
    second, metrics = apply(with_grads(first, bad), jnp.int32(0))
    assert int(metrics["skipped_updates"]) == 1
    jax.tree.map(np.testing.assert_array_equal, (second.params, second.opt_state), (first.params, first.opt_state))
    zeros = {path: np.zeros(shape, np.float32) for path, shape in SHAPES.items()}
    still, _ = apply(with_grads(init_state(params, update.optimizer), zeros), jnp.int32(0))
    jax.tree.map(np.testing.assert_array_equal, still.params, params)


def compare_meshes() -> None:
    """Runs in the subprocess of the test below: two updates on meshes, and on one device."""
    meshes = {"one": {}, "fsdp 2": {"fsdp": 2}, "fsdp 2 x expert 2 x tensor 2": {"fsdp": 2, "expert": 2, "tensor": 2}}
    found: dict[str, Any] = {}
    for name, axes in meshes.items():
        size = int(np.prod(list(axes.values()), dtype=int))
        mesh = make_mesh(**axes, devices=jax.devices()[:size])
        update = update_of(CONFIG, mesh)
        state = init_state(jax.tree.map(jnp.asarray, unflatten(arrays(0))), update.optimizer)
        split = param_shardings(state, mesh)
        momentum = split.opt_state[1].inner_states["muon"].inner_state[0].trace["layers"]
        assert momentum["q_proj"]["kernel"] == split.params["layers"]["q_proj"]["kernel"]
        apply = jax.jit(update, in_shardings=(split, None), out_shardings=(split, None))
        for i in range(2):
            state, _ = apply(jax.device_put(with_grads(state, arrays(i + 1)), split), jnp.int32(0))
        text = apply.lower(state, jnp.int32(0)).compile().as_text() or ""
        found[name] = jax.device_get((state.params, state.opt_state)), text
    for name, (got, text) in found.items():
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, found["one"][0])
        assert name == "one" or (" all-to-all(" in text and " all-gather(" not in text), text
        print("equal on", name)


@pytest.mark.heavy
def test_muon_on_a_mesh_equals_one_device_and_gathers_no_matrix():
    """Three layers, which two devices split unevenly; XLA's own choice would be 15 gatherings of each kernel."""
    code = "from tests.learner.update import test_muon; test_muon.compare_meshes()"
    assert eight_devices.run(code).count("equal on") == 3
