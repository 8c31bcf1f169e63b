import dataclasses
import json
import math
import subprocess
import sys

import pytest

from learner.model.config import Architecture
from learner.model.hf.fields import RopeScaling

QWEN3 = {  # the fields of Qwen3-0.6B's config.json (transformers 4)
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {  # Qwen2.5-0.5B's
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MOE = QWEN3 | {  # Qwen3-30B-A3B's
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
}
LLAMA = {  # Llama-3.2-1B's
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL = {  # Mistral-7B-v0.1's
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
GEMMA3 = {  # gemma-3-4b-pt's text_config, said in full
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "model_type": "gemma3_text",
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
}
NESTED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA2 = {  # gemma-2-2b's
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MIXED = {"layer_types": ["full_attention"] * 20 + ["sliding_attention"] * 8}
WINDOWS = {"use_sliding_window": True, "layer_types": ["full_attention"] * 21 + ["sliding_attention"] * 3}


def without(raw, *fields):
    return {k: v for k, v in raw.items() if k not in fields}


def test_from_hf_qwen3_reads_every_shape():
    c = Architecture.from_hf(QWEN3)
    assert (c.family, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == ("qwen3", 28, 16, 8, 128)
    assert (c.vocab_size, c.hidden_size, c.intermediate_size) == (151936, 1024, 3072)
    assert (c.rope_theta, c.rms_norm_eps, c.max_position_embeddings) == (1e6, 1e-6, 40960)
    assert (c.qk_norm, c.qkv_bias, c.o_bias, c.tie_word_embeddings) == (True, False, False, True)
    biased = Architecture.from_hf(QWEN3 | {"attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_from_hf_qwen2_divides_head_dim_and_biases_only_qkv():
    c = Architecture.from_hf(QWEN2)
    assert (c.head_dim, c.qk_norm, c.qkv_bias, c.o_bias) == (64, False, True, False)
    assert Architecture.from_hf(QWEN2 | {"head_dim": 32}).head_dim == 32
    assert Architecture.from_hf(QWEN2 | {"head_dim": None}).head_dim == 64


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    ],
)
def test_from_hf_rope_theta_is_read_from_either_home(rope):
    assert Architecture.from_hf(without(QWEN3, "rope_theta", "rope_scaling") | rope).rope_theta == 5e5


@pytest.mark.parametrize(
    "base,change,message",
    [
        (QWEN3, {"model_type": "gpt2"}, r"model_type: got 'gpt2', wanted one of \['gemma2', 'gemma3_text', 'llama', "),
        (QWEN3, {"model_type": "gemma3"}, "model_type: got 'gemma3', .*save its text part alone, as gemma3_text"),
        (QWEN3, {"model_type": "llama"}, r"architectures: got .*wanted \['LlamaForCausalLM'\]"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act: got 'gelu', wanted 'silu'"),
        (LLAMA, {"qkv_bias": True}, "qkv_bias: got True, wanted None or absent .vLLM would"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window: got 4096, wanted None or absent .vLLM would"),
        (LLAMA, {"layer_types": ["full_attention"] * 16}, "layer_types: got"),
        (LLAMA, {"is_causal": False}, "is_causal: got False"),
        (LLAMA, {"attention_bias": None}, "attention_bias: got None, wanted bool"),
        (LLAMA, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type: got 'dynamic'"),
        (LLAMA, {"mlp_bias": 1}, "mlp_bias: got 1, wanted bool"),
        (MISTRAL, {"attention_bias": True}, "attention_bias: got True, wanted False or absent .vLLM would"),
        (MISTRAL, {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling: got"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window: got 0, wanted a positive"),
        (MISTRAL, {"layer_types": ["full_attention"] * 32}, "layer_types: got .*every layer has the window, or none"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0, .*transformers and vLLM both"),
        (GEMMA3, {"final_logit_softcapping": 0.0}, "final_logit_softcapping: got 0.0, wanted a positive"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation: got 'gelu', wanted 'gelu_pytorch_tanh'"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
        (GEMMA3, {"sliding_window": None}, "sliding_window: got None, wanted int"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern: got 0"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0.0, wanted a positive"),
        (GEMMA3, {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures: got"),
        (GEMMA3, {"rope_parameters": NESTED}, "rope_scaling: got .*wanted absent, as rope_parameters says"),
        (
            without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling"),
            {"rope_parameters": NESTED | {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention: got .*local layers are not scaled",
        ),
        (
            without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling"),
            {"rope_parameters": NESTED | {"chunked_attention": {}}},
            "rope_parameters.chunked_attention: got",
        ),
        (
            without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling"),
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters.rope_type: got 'default', wanted full_attention and sliding_attention only",
        ),
        (GEMMA2, {"tie_word_embeddings": False}, "tie_word_embeddings: got False, wanted True or absent .vLLM has no"),
        (GEMMA2, {"sliding_window_pattern": 3}, "sliding_window_pattern: got 3, wanted 2 or absent"),
        (GEMMA2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping: got -1.0, wanted a positive"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        (QWEN3, {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type: got 'dynamic'"),
        (QWEN3, {"rope_parameters": {"type": "longrope"}}, "rope_parameters.type: got 'longrope'"),
        (QWEN3, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.factor: got 2, wanted a float"),
        (
            QWEN3,
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "rope_scaling.factor: got 0.5, wanted a num",
        ),
        (
            QWEN3,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}},
            "rope_scaling.alpha: got 1, wanted",
        ),
        (
            QWEN3,
            {"rope_scaling": {"type": "yarn", "rope_type": "linear"}},
            "rope_scaling.type: got 'yarn', wanted",
        ),
        (QWEN3, {"rope_scaling": YARN | {"factor": None}}, "rope_scaling.factor: got None"),
        (QWEN3, {"rope_scaling": YARN | {"factor": 1.1}}, "rope_scaling.factor: got 1.1, wanted at least .* = 1.25"),
        (QWEN3, {"rope_scaling": YARN | {"beta_fast": None}}, "rope_scaling.beta_fast: got None"),
        (
            QWEN3,
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}},
            "rope_scaling: got .*the same",
        ),
        (
            QWEN3,
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            "original_max_position_emb",
        ),
        (QWEN3, {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor: got"),
        (QWEN3, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (QWEN3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta: got .*wanted one value"),
        (QWEN3, {"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention: got"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "layer_types: got .*use_sliding_window"),
        (QWEN3, {"layer_types": ["full_attention"] * 27}, "layer_types"),
        (QWEN3, {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window: got 0"),
        (without(QWEN2, "max_window_layers"), {"use_sliding_window": True}, "max_window_layers: missing"),
        (QWEN2, WINDOWS | {"max_window_layers": 24}, "layer_types: got .* as max_window_layers = 24 says"),
        (MOE, {"use_sliding_window": True, "sliding_window": 8} | MIXED, "layer_types: got .*Qwen3-MoE windows every"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step: got 2"),
        (MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers: got \[0\]"),
        (MOE, {"attention_bias": True}, "attention_bias: got True.*vLLM"),
        (MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok: got 129, wanted at most 128"),
        (MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size: got 0"),
        (MOE, {"num_local_experts": 64}, "num_experts: got 128, wanted num_local_experts, 64"),
        (without(MOE, "norm_topk_prob"), {}, "norm_topk_prob: missing"),
        (QWEN3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
        (QWEN3, {"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        (QWEN3, {"attention_dropout": 0.1}, "attention_dropout: got 0.1"),
        (QWEN3, {"num_key_value_heads": 3}, "num_key_value_heads: got 3, wanted a divisor of 16"),
        (QWEN3, {"head_dim": 127}, "head_dim: got 127, wanted an even"),
        (QWEN3, {"vocab_size": "151936"}, "vocab_size: got '151936', wanted int"),
        (QWEN3, {"num_hidden_layers": 0}, "num_hidden_layers: got 0, wanted a positive"),
        (QWEN3, {"rms_norm_eps": 0}, "rms_norm_eps: got 0.0, wanted a positive"),
        (QWEN2, {"hidden_size": 897}, "hidden_size: got 897, wanted a multiple of 14"),
        (without(QWEN3, "rope_theta"), {}, "rope_theta: missing"),
        (without(QWEN3, "head_dim"), {}, "head_dim: missing"),
        (without(QWEN3, "tie_word_embeddings"), {}, "tie_word_embeddings: missing"),
        (without(QWEN3, "attention_bias"), {}, "attention_bias: missing"),
    ],
)
def test_from_hf_config_it_does_not_compute_is_refused_by_field(base, change, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf(base | change)


YARN_READ = RopeScaling(kind="yarn", factor=4.0, original_length=32768, attention_factor=0.1 * math.log(4) + 1)


@pytest.mark.parametrize("home", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope,want",
    [
        (YARN, YARN_READ),
        (without(YARN, "rope_type") | {"type": "yarn"}, YARN_READ),
        (
            without(YARN, "original_max_position_embeddings"),
            dataclasses.replace(YARN_READ, original_length=40960),
        ),
        (YARN | {"attention_factor": 1.5}, dataclasses.replace(YARN_READ, attention_factor=1.5)),
        (YARN | {"mscale": 0.7}, YARN_READ),
        (YARN | {"mscale": 1, "mscale_all_dim": 1.0}, dataclasses.replace(YARN_READ, attention_factor=1.0)),
        (
            YARN | {"beta_fast": 16, "beta_slow": 2.0, "truncate": False},
            dataclasses.replace(YARN_READ, beta_fast=16.0, beta_slow=2.0, truncate=False),
        ),
        (LLAMA3, RopeScaling(kind="llama3", factor=8.0, original_length=8192)),
        ({"type": "linear", "factor": 2.5}, RopeScaling(kind="linear", factor=2.5)),
        ({"type": "default"}, None),
    ],
)
def test_from_hf_rope_scaling_is_read_from_either_home(home, rope, want):
    config = Architecture.from_hf(without(QWEN3, "rope_scaling") | {home: rope})
    assert config.rope_scaling == want and config.rope_theta == 1e6


def test_from_hf_sliding_window_reads_which_layers_have_it():
    window = {"use_sliding_window": True, "sliding_window": 16}
    for raw, want in [
        (QWEN2 | window | {"max_window_layers": 24}, ()),
        (QWEN2 | window | {"max_window_layers": 21}, (False,) * 21 + (True,) * 3),
        (QWEN2 | window | {"max_window_layers": 0}, (True,) * 24),
        (QWEN3 | window | MIXED | {"max_window_layers": 20}, (False,) * 20 + (True,) * 8),
        (QWEN3 | {"sliding_window": 16, "use_sliding_window": False}, ()),
        (QWEN3 | window | {"sliding_window": None, "max_window_layers": 0}, ()),
        (MOE | window, (True,) * 28),
    ]:
        config = Architecture.from_hf(raw)
        assert (config.sliding_window, config.windowed_layers) == (16 if want else None, want)


def test_from_hf_moe_reads_its_experts_under_either_name():
    c = Architecture.from_hf(MOE)
    assert (c.num_experts, c.num_experts_per_token, c.moe_intermediate_size, c.norm_topk_prob) == (128, 8, 768, True)
    assert (c.qk_norm, c.param_names.num_experts) == (True, 128)
    assert Architecture.from_hf(without(MOE, "num_experts") | {"num_local_experts": 128}) == c


def test_from_hf_llama_of_an_early_config_takes_what_transformers_does():
    early = ("head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "attention_bias", "mlp_bias")
    c = Architecture.from_hf(without(LLAMA, *early, "tie_word_embeddings", "max_position_embeddings"))
    assert (c.head_dim, c.num_kv_heads, c.rope_theta, c.rope_scaling) == (64, 32, 1e4, None)
    assert (c.qkv_bias, c.o_bias, c.mlp_bias, c.tie_word_embeddings) == (False, False, False, False)
    assert c.max_position_embeddings == 2048
    biased = Architecture.from_hf(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias, biased.qk_norm) == (True, True, True, False)


def test_from_hf_mistral_windows_every_layer_or_none():
    c = Architecture.from_hf(MISTRAL)
    assert (c.sliding_window, c.windowed_layers, c.head_dim) == (4096, (True,) * 32, 128)
    c = Architecture.from_hf(MISTRAL | {"sliding_window": None})
    assert (c.sliding_window, c.windowed_layers) == (None, ())


def test_from_hf_gemma3_reads_two_rotations_from_either_form():
    c = Architecture.from_hf(GEMMA3)
    assert (c.rope_theta, c.local_rope_theta) == (1e6, 1e4) and c.tie_word_embeddings
    assert c.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (c.attention_scale, c.attention_soft_cap, c.logit_soft_cap) == (1 / 16, None, None)
    assert c.windowed_layers == ((True,) * 5 + (False,)) * 5 + (True,) * 4 and c.sliding_window == 1024
    plain = without(GEMMA3, "rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    assert Architecture.from_hf(plain | {"rope_parameters": NESTED}) == c
    types = ["sliding_attention" if w else "full_attention" for w in c.windowed_layers]
    assert Architecture.from_hf(GEMMA3 | {"layer_types": types}) == c
    assert Architecture.from_hf(plain).rope == (1e6, None, 1e4)


def test_from_hf_gemma2_reads_its_soft_caps_and_windows_every_other_layer():
    c = Architecture.from_hf(GEMMA2)
    assert (c.attention_soft_cap, c.logit_soft_cap, c.local_rope_theta) == (50.0, 30.0, None)
    assert c.windowed_layers == (True, False) * 13 and not c.qk_norm
    assert Architecture.from_hf(without(GEMMA2, "attn_logit_softcapping")).attention_soft_cap == 50.0
    assert Architecture.from_hf(GEMMA2 | {"attn_logit_softcapping": None}).attention_soft_cap is None


KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "base,change",
    [
        (GEMMA2, {}),
        (GEMMA2, {"sliding_window_pattern": 2}),
        (GEMMA2, {"num_hidden_layers": 5, "layer_types": KINDS}),
        (GEMMA2, {"num_hidden_layers": 5, "layer_types": KINDS, "sliding_window_pattern": 2}),
        (GEMMA2, {"layer_types": None}),
        (GEMMA3, {}),
        (GEMMA3, {"sliding_window_pattern": 3}),
        (GEMMA3, {"sliding_window_pattern": 1}),
        (GEMMA3, {"_sliding_window_pattern": 3}),
        (without(GEMMA3, "sliding_window_pattern"), {"_sliding_window_pattern": 3}),
        (without(GEMMA3, "sliding_window_pattern"), {"layer_types": None}),
        (GEMMA3, {"num_hidden_layers": 5, "layer_types": KINDS}),
        (GEMMA3, {"num_hidden_layers": 5, "layer_types": KINDS, "sliding_window_pattern": None}),
    ],
)
def test_from_hf_gemma_windows_the_layers_that_transformers_does(base, change):
    from transformers import AutoConfig

    raw = base | change
    found = AutoConfig.for_model(**raw).layer_types
    want = tuple(kind == "sliding_attention" for kind in found)
    assert Architecture.from_hf(raw).windowed_layers == (want if any(want) else ())


def test_pattern_that_is_refused_of_gemma2_is_ignored_by_transformers():
    from transformers import AutoConfig

    assert AutoConfig.for_model(**GEMMA2, sliding_window_pattern=3).layer_types[:2] == KINDS[2:4]


def test_from_hf_missing_or_broken_file_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model config at"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="wanted an object"):
        Architecture.from_hf(tmp_path / "config.json")


EVERY_KIND = [
    QWEN2,
    QWEN3,
    MOE,
    QWEN3 | {"rope_scaling": YARN},
    QWEN2 | {"use_sliding_window": True, "max_window_layers": 3},
    MOE | {"use_sliding_window": True, "sliding_window": 7},
    LLAMA,
    LLAMA | {"attention_bias": True, "mlp_bias": True, "rope_scaling": None, "head_dim": None},
    MISTRAL,
    GEMMA3,
    without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling") | {"rope_parameters": NESTED},
    GEMMA2,
]


@pytest.mark.parametrize("raw", EVERY_KIND)
def test_to_hf_returns_what_was_read(raw, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = Architecture.from_hf(tmp_path)
    assert config.to_hf() == raw and hash(config) == hash(Architecture.from_hf(raw))


@pytest.mark.parametrize(
    "raw", [QWEN2, QWEN3, MOE, without(QWEN3, "rope_theta") | {"rope_parameters": {"rope_theta": 1e6}}]
)
def test_to_hf_of_a_changed_config_rewrites_that_field_and_keeps_the_rest(raw):
    raw = raw | ({} if raw is MOE else {"layer_types": ["full_attention"] * raw["num_hidden_layers"]})
    changed = dataclasses.replace(Architecture.from_hf(raw), num_layers=2, rope_theta=7.0, tie_word_embeddings=False)
    assert Architecture.from_hf(changed.to_hf()) == changed
    rewritten = ("num_hidden_layers", "rope_theta", "rope_parameters", "layer_types")
    want = without(raw | {"tie_word_embeddings": False}, *rewritten)
    assert without(changed.to_hf(), *rewritten) == want


@pytest.mark.parametrize("raw", EVERY_KIND)
@pytest.mark.parametrize(
    "change",
    [
        dict(rope_scaling=RopeScaling(kind="linear", factor=3.0)),
        dict(rope_scaling=None),
        dict(sliding_window=None, windowed_layers=()),
        dict(sliding_window=5, windowed_layers=(True,) * 4, num_layers=4),
    ],
)
def test_to_hf_of_changed_scaling_or_windows_reads_back_equal(raw, change):
    read = Architecture.from_hf(raw)
    if "num_layers" in change and read.family == "llama":
        with pytest.raises(ValueError, match="sliding_window: got 5, wanted none for llama"):
            dataclasses.replace(read, **change)
        return
    changed = dataclasses.replace(read, **change)
    assert Architecture.from_hf(changed.to_hf()) == changed


@pytest.mark.parametrize("change", [dict(rope_theta=7.0), dict(local_rope_theta=7.0), dict(logit_soft_cap=7.0)])
@pytest.mark.parametrize("raw", EVERY_KIND[-3:-1])
def test_to_hf_of_a_changed_gemma3_reads_back_equal(raw, change):
    changed = dataclasses.replace(Architecture.from_hf(raw), **change)
    assert Architecture.from_hf(changed.to_hf()) == changed


@pytest.mark.parametrize("raw", EVERY_KIND)
def test_to_hf_of_a_config_made_in_code_reads_back_equal(raw):
    made = dataclasses.replace(Architecture.from_hf(raw), hf_json="{}")
    assert Architecture.from_hf(made.to_hf()) == made


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(sliding_window=4), "sliding_window: got 4"),
        (dict(sliding_window=4, windowed_layers=(True,)), "layer_types: got"),
        (dict(num_experts=4), "num_experts: got 4, wanted 0 for qwen3"),
        (dict(logit_soft_cap=30.0), "final_logit_softcapping: got 30.0, wanted None for qwen3"),
        (dict(mlp_bias=True), "mlp_bias: got True, wanted False for qwen3"),
        (dict(local_rope_theta=1e4), "rope_local_base_freq: got 10000.0, wanted none for qwen3"),
    ],
)
def test_model_config_with_fields_that_contradict_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Architecture.from_hf(QWEN3), **change)


@pytest.mark.integration
def test_config_import_brings_in_no_jax():
    code = "import sys, learner.model.config; assert not {'jax', 'flax', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
