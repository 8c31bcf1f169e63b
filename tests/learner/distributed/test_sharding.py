import types
from typing import Any

import jax
import optax
import pytest
from jax.sharding import PartitionSpec

from bridge.param_names import flatten
from configs.sections import LoraConfig
from learner.distributed.sharding import (
    AXES,
    BATCH_AXES,
    FSDP,
    RULES,
    batch_sharding,
    make_mesh,
    param_shardings,
    param_spec,
)
from learner.model.decoder import abstract_params
from learner.model.lora import abstract_adapters
from learner.model.value_head import HEAD, zero_head
from tests.learner.model.tiny import MODELS, config_of


# Stands for a mesh of which this process has no devices.
def mesh_of(**axes: int) -> Any:
    return types.SimpleNamespace(shape=dict.fromkeys(AXES, 1) | axes)


SCALE = jax.ShapeDtypeStruct((8,), "float32")
FOUR_WAY = mesh_of(fsdp=2, tensor=2)


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODELS)
def test_rules_cover_every_parameter_and_use_each_axis_once(name):
    for path, spec in flatten(abstract_params(config_of(name))).items():
        axes = [axis for dim in RULES[path] if dim for axis in ([dim] if isinstance(dim, str) else dim)]
        assert len(RULES[path]) == len(spec.shape) and len(axes) == len(set(axes))


@pytest.mark.heavy
def test_rules_have_no_path_that_no_model_has():
    adapters = flatten(abstract_adapters(config_of("qwen3-tied"), LoraConfig(rank=2)))
    head = flatten({HEAD: zero_head(config_of("qwen3-tied"), "float32")})
    assert set(RULES) == {path for name in MODELS for path in config_of(name).param_names.paths()} | {*adapters, *head}


def test_param_spec_splits_outputs_by_tensor_and_fsdp():
    assert param_spec("layers/q_proj/kernel", (3, 8, 6), FOUR_WAY) == PartitionSpec(None, ("tensor", *FSDP), None)
    assert param_spec("layers/o_proj/kernel", (3, 6, 8), FOUR_WAY) == PartitionSpec(None, FSDP, "tensor")
    assert param_spec("mu/layers/q_proj/bias", (3, 8), FOUR_WAY) == PartitionSpec(None, "tensor")


def test_param_spec_dim_that_does_not_divide_stays_whole_or_is_split_over_fewer_axes():
    assert param_spec("layers/o_proj/kernel", (3, 6, 7), FOUR_WAY) == PartitionSpec(None, FSDP, None)
    # Over fewer axes, where not all divide: 6 outputs by fsdp, but not by fsdp x sequence.
    four = mesh_of(fsdp=2, sequence=2)
    assert param_spec("layers/o_proj/kernel", (3, 6, 8), four) == PartitionSpec(None, ("fsdp", "expert"), "tensor")


@pytest.mark.parametrize(
    "path,shape,message",
    [("layers/fog/kernel", (3, 4), "no sharding rule"), ("layers/q_proj/kernel", (3, 4), "expected 3 dims")],
)
def test_param_spec_unknown_parameter_is_refused(path, shape, message):
    with pytest.raises(ValueError, match=message):
        param_spec(path, shape, FOUR_WAY)


@pytest.mark.parametrize(
    "sizes,message",
    [({"data": 2}, r"'data': 2.*needs 2 devices, found 1"), ({"fsdp": 0}, "must be >= 1, got .*'fsdp': 0")],
)
def test_make_mesh_wrong_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes, devices=jax.devices()[:1])


def test_param_shardings_of_an_optimizer_state_follow_the_parameters():
    mesh = make_mesh(devices=jax.devices()[:1])
    params = abstract_params(config_of("qwen3-tied"))
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    got = param_shardings(state, mesh)
    assert got[0].mu == got[0].nu == param_shardings(params, mesh)
    assert got[0].count.spec == PartitionSpec()
    assert batch_sharding(mesh).spec == PartitionSpec(BATCH_AXES, "sequence")


def test_param_shardings_of_a_factored_second_moment_replicate_its_rows_and_columns():
    mesh = make_mesh(devices=jax.devices()[:1])
    params = {"embed": {"embedding": jax.ShapeDtypeStruct((256, 128), "float32")}, "final_norm": {"scale": SCALE}}
    state = jax.eval_shape(optax.scale_by_factored_rms().init, params)
    assert state.v_row["embed"]["embedding"].shape == (128,)
    got = param_shardings(state, mesh)
    assert got.v_row["embed"]["embedding"].spec == got.v["embed"]["embedding"].spec == PartitionSpec()
    assert got.v["final_norm"]["scale"].spec == PartitionSpec(None)
