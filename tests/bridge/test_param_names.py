import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.param_names import ParamNames, check_same_names, flatten, is_stacked, unflatten
from tests.param_tensors import iter_tensors

QWEN3 = ParamNames(num_layers=2, tie_word_embeddings=True, qkv_bias=False, o_bias=False, qk_norm=True)
QWEN2 = ParamNames(num_layers=3, tie_word_embeddings=False, qkv_bias=True, o_bias=False, qk_norm=False)
MOE = dataclasses.replace(QWEN3, num_experts=3)
QWEN3_LAYER = [
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_norm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
]


def leaves_of(names):
    return {
        path: np.arange(math.prod(names.stack(path)) * 6).reshape(*names.stack(path), 3, 2)
        if is_stacked(path)
        else np.zeros(4)
        for path in names.paths()
    }


def test_all_hf_names_qwen3_are_a_checkpoints():
    want = {f"model.layers.{i}.{name}" for i in range(2) for name in QWEN3_LAYER}
    assert set(QWEN3.all_hf_names()) == want | {"model.embed_tokens.weight", "model.norm.weight"}


def test_all_hf_names_qwen2_adds_biases_and_head_and_drops_qk_norm():
    got = set(QWEN2.all_hf_names())
    assert {f"model.layers.2.self_attn.{x}_proj.bias" for x in "qkv"} | {"lm_head.weight"} <= got
    assert not any("q_norm" in name or "o_proj.bias" in name for name in got)
    biased = dataclasses.replace(QWEN3, qkv_bias=True, o_bias=True)
    assert "model.layers.1.self_attn.o_proj.bias" in biased.all_hf_names()


def test_all_hf_names_moe_has_a_router_and_experts_instead_of_the_mlp():
    dense = {name for name in QWEN3.all_hf_names() if ".mlp." not in name}
    moe = {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    experts = [f"model.layers.{i}.mlp.experts.{j}" for i in range(2) for j in range(3)]
    moe |= {f"{expert}.{x}_proj.weight" for expert in experts for x in ("gate", "up", "down")}
    assert set(MOE.all_hf_names()) == dense | moe and len(MOE.all_hf_names()) == len(dense | moe)


ANY_MODEL = st.builds(
    ParamNames,
    num_layers=st.integers(1, 12),
    tie_word_embeddings=st.booleans(),
    qkv_bias=st.booleans(),
    o_bias=st.booleans(),
    qk_norm=st.booleans(),
    num_experts=st.sampled_from([0, 1, 2, 11]),
)


@given(names=ANY_MODEL)
def test_locate_is_the_inverse_of_hf_names(names):
    for path in names.paths():
        indices = itertools.product(*(range(n) for n in names.stack(path)))
        for index, name in zip(indices, names.hf_names(path), strict=True):
            assert names.locate(name) == (path, index)
    assert len(set(names.all_hf_names())) == len(names.all_hf_names())


@pytest.mark.parametrize(
    "hf_name",
    [
        "lm_head.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.01.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "layers.0.mlp.up_proj.weight",
    ],
)
def test_locate_tensor_of_another_model_is_refused(hf_name):
    with pytest.raises(ValueError, match="is not in this model"):
        QWEN3.locate(hf_name)


@pytest.mark.parametrize(
    "hf_name",
    [
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.2.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.00.up_proj.weight",
        "model.layers.0.mlp.experts.0.gate.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
def test_locate_expert_of_another_model_is_refused(hf_name):
    with pytest.raises(ValueError, match="is not in this model"):
        MOE.locate(hf_name)


@pytest.mark.parametrize("path", ["lm_head/kernel", "layers/q_proj/bias", "layers/o_proj/bias", "q_proj/kernel"])
def test_hf_names_path_of_another_model_is_refused(path):
    with pytest.raises(ValueError, match="parameter .*: expected one of"):
        QWEN3.hf_names(path)


def test_iter_tensors_yields_each_layer_as_a_view_of_its_stack():
    leaves = leaves_of(QWEN2)
    got = dict(iter_tensors(QWEN2, leaves))
    assert tuple(got) == QWEN2.all_hf_names()
    stack = leaves["layers/up_proj/kernel"]
    layer = got["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(layer, stack[1])
    assert np.shares_memory(layer, stack) and layer.flags.c_contiguous
    assert got["model.norm.weight"] is leaves["final_norm/scale"]


def test_flatten_then_unflatten_is_the_same_tree():
    tree = {"layers": {"q_proj": {"kernel": 1, "bias": 2}}, "embed": {"embedding": 3}}
    assert flatten(tree) == {"layers/q_proj/kernel": 1, "layers/q_proj/bias": 2, "embed/embedding": 3}
    assert unflatten(flatten(tree)) == tree


def test_param_names_without_layers_is_refused():
    with pytest.raises(ValueError, match="num_layers must be >= 1, got 0"):
        dataclasses.replace(QWEN3, num_layers=0)
    with pytest.raises(ValueError, match="num_experts must be >= 0, got -1"):
        dataclasses.replace(QWEN3, num_experts=-1)


@pytest.mark.parametrize(
    ("got", "said"), [("ab", None), ("a", "1 missing ['b'], 0 unexpected"), ("abc", "0 missing [], 1 unexpected ['c']")]
)
def test_names_that_are_missing_or_too_many_are_told_and_either_is_refused(got, said):
    tensors = dict.fromkeys(got)
    if said is None:
        check_same_names("tensor", got=tensors, wanted=("a", "b"))
        return
    with pytest.raises(ValueError) as e:
        check_same_names("tensor", got=tensors, wanted=("a", "b"))
    assert said in str(e.value)
