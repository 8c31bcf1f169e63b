"""A config.json that isn't computed, can't be read or contradicts itself is refused by name."""

import dataclasses

import pytest

from learner.model.architecture import Architecture
from tests.learner.model.published import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    LLAMA3,
    MISTRAL,
    MIXED,
    MOE,
    NESTED,
    QWEN2,
    QWEN3,
    WINDOWS,
    YARN,
    without,
)


@pytest.mark.parametrize(
    "base,change,message",
    [
        (QWEN3, {"model_type": "gpt2"}, r"model_type: got 'gpt2', wanted one of \['gemma2', 'gemma3_text', 'llama', "),
        (QWEN3, {"model_type": "gemma3"}, "model_type: got 'gemma3', .*save its text part alone, as gemma3_text"),
        (QWEN3, {"model_type": "llama"}, r"architectures: got .*wanted \['LlamaForCausalLM'\]"),
        (
            QWEN3,
            {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}},
            "auto_map: got .*no code of a model's own",
        ),
        (QWEN3, {"auto_map": {"AutoConfig": "them/repo--configuration_x.X", "AutoModel": "m.X"}}, "auto_map: got"),
        (LLAMA, {"auto_map": {"AutoConfig": "configuration_x.X"}}, "auto_map: got .*a LlamaForCausalLM alike"),
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


def test_from_hf_missing_or_broken_file_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model config at"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="wanted an object"):
        Architecture.from_hf(tmp_path / "config.json")


@pytest.mark.parametrize("named", [None, {}, {"AutoTokenizer": ["mine.Slow", None]}, {"AutoProcessor": "mine.P"}])
def test_own_code_of_a_tokenizer_is_no_reason_to_refuse_a_model(named):
    assert Architecture.from_hf(QWEN3 | {"auto_map": named}).model_type == "qwen3"
