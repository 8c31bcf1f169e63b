import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import optax
import pytest
from jax.sharding import PartitionSpec

from bridge.names import flatten
from learner.mesh import RULES, batch_sharding, make_mesh, param_shardings, param_spec
from learner.model.decoder import abstract_params
from tests.learner.model.tiny import MODELS, config_of

ROOT = pathlib.Path(__file__).parents[2]


# Stands for a mesh of which this process has no devices.
FOUR_WAY: Any = types.SimpleNamespace(shape={"data": 1, "fsdp": 2, "tensor": 2})


@pytest.mark.parametrize("name", MODELS)
def test_rules_cover_every_parameter_and_use_each_axis_once(name):
    for path, spec in flatten(abstract_params(config_of(name))).items():
        axes = [axis for axis in RULES[path] if axis]
        assert len(RULES[path]) == len(spec.shape) and len(axes) == len(set(axes))


def test_rules_have_no_path_that_no_model_has():
    assert set(RULES) == {path for name in MODELS for path in config_of(name).param_names.paths()}


def test_param_spec_splits_outputs_by_tensor_and_inputs_by_fsdp():
    assert param_spec("layers/q_proj/kernel", (3, 8, 6), FOUR_WAY) == PartitionSpec(None, "tensor", "fsdp")
    assert param_spec("layers/o_proj/kernel", (3, 6, 8), FOUR_WAY) == PartitionSpec(None, "fsdp", "tensor")
    assert param_spec("mu/layers/q_proj/bias", (3, 8), FOUR_WAY) == PartitionSpec(None, "tensor")


def test_param_spec_dim_that_does_not_divide_stays_whole_or_is_refused():
    assert param_spec("layers/q_proj/kernel", (3, 7, 6), FOUR_WAY) == PartitionSpec(None, None, "fsdp")
    with pytest.raises(ValueError, match=r"layers/q_proj/kernel: dim 7 of \(3, 7, 6\).*tensor=2"):
        param_spec("layers/q_proj/kernel", (3, 7, 6), FOUR_WAY, strict=True)


@pytest.mark.parametrize(
    "path,shape,message",
    [("layers/router/kernel", (3, 4), "no sharding rule"), ("layers/q_proj/kernel", (3, 4), "wanted 3 dims")],
)
def test_param_spec_unknown_parameter_is_refused(path, shape, message):
    with pytest.raises(ValueError, match=message):
        param_spec(path, shape, FOUR_WAY)


@pytest.mark.parametrize(
    "sizes,message",
    [((2, 1, 1), r"'data': 2.*needs 2 devices, found 1"), ((1, 0, 1), "must be >= 1, got .*'fsdp': 0")],
)
def test_make_mesh_wrong_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(*sizes, devices=jax.devices()[:1])


def test_param_shardings_of_an_optimizer_state_follow_the_parameters():
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    params = abstract_params(config_of("qwen3-tied"))
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    got = param_shardings(state, mesh)
    assert got[0].mu == got[0].nu == param_shardings(params, mesh)
    assert got[0].count.spec == PartitionSpec()
    assert batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))


FOUR_DEVICES = """
import sys, tempfile, jax, jax.numpy as jnp, numpy as np
from learner.mesh import batch_sharding, make_mesh, param_shardings
from learner.model.config import ModelConfig
from learner.model.decoder import init_params, make_apply, output_head
from learner.model.hf_io import load, save
from learner.model.logprobs import token_logprobs
from bridge.names import flatten, unflatten

config = ModelConfig(family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False,
    max_position_embeddings=64, qkv_bias=False, o_bias=False)
fresh = flatten(jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)))
params = unflatten({p: np.asarray(x if 'scale' in p else x * 5) for p, x in fresh.items()})
rng = np.random.default_rng(0)
tokens = rng.integers(0, 64, (4, 16)).astype(np.int32)
segments = np.repeat([[1] * 6 + [2] * 7 + [0] * 3], 4, 0).astype(np.int32)
positions = np.repeat([[*range(6), *range(7), 0, 0, 0]], 4, 0).astype(np.int32)
weights = rng.normal(size=(4, 16)) * (segments > 0)
batch = dict(tokens=tokens, segments=segments, positions=positions, weights=weights)

def step(activation_sharding):
    apply = make_apply(config, attention_block=8, activation_sharding=activation_sharding)
    def loss(params, b):
        hidden = apply(params, b["tokens"], b["positions"], b["segments"])
        targets = jnp.roll(b["tokens"], -1, 1).reshape(-1)
        hidden = hidden.reshape(-1, 32)
        logp, entropy = token_logprobs(hidden, output_head(params), targets, temperature=0.7, chunk=16)
        return ((logp + 0.1 * entropy) * b["weights"].reshape(-1)).sum(), hidden
    return jax.value_and_grad(loss, has_aux=True)

one = jax.devices()[0]
(_, want_hidden), want = jax.jit(step(None))(jax.device_put(params, one), jax.device_put(batch, one))
want = flatten(want)
assert max(np.abs(w).max() for w in want.values()) > 1e-2
folder = tempfile.mkdtemp() + "/model"
save(folder, config, params)
for sizes in sys.argv[1:]:
    data, fsdp, tensor = map(int, sizes.split("x"))
    mesh = make_mesh(data, fsdp, tensor)
    shardings = param_shardings(params, mesh, strict=True)
    flat = flatten(shardings)
    _, sharded = load(folder, sharding_fn=lambda path, shape: flat[path])
    kernel = sharded["layers"]["up_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 48 // tensor, 32 // fsdp), kernel.sharding
    rows = batch_sharding(mesh)
    f = jax.jit(step(rows), in_shardings=(shardings, rows), out_shardings=((None, None), shardings))
    (_, hidden), got = f(sharded, jax.device_put(batch, rows))
    np.testing.assert_allclose(hidden, want_hidden, atol=1e-5)
    for path, leaf in flatten(got).items():
        np.testing.assert_array_equal(flatten(sharded)[path], flatten(params)[path])
        scale = max(1, np.abs(want[path]).max())
        np.testing.assert_allclose(leaf, want[path], atol=1e-5 * scale, err_msg=f"{sizes} {path}")
    print("equal on", sizes)
"""


@pytest.mark.integration
def test_load_forward_and_gradient_on_four_devices_equal_one_device():
    sizes = ["1x4x1", "2x2x1", "1x2x2"]  # data x fsdp x tensor
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", FOUR_DEVICES, *sizes]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"equal on {size}" for size in sizes]
