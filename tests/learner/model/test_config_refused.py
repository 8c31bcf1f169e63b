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
        (
            QWEN3,
            {"model_type": "gpt2"},
            r"model_type: expected one of \['gemma2', 'gemma3_text', 'llama', .*got 'gpt2'",
        ),
        (
            QWEN3,
            {"model_type": "gemma3"},
            "model_type: expected .*got 'gemma3'; .*text part",
        ),
        (QWEN3, {"model_type": "llama"}, r"architectures: expected \['LlamaForCausalLM'\]"),
        (
            QWEN3,
            {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}},
            "auto_map: expected .*no code of a model's own",
        ),
        (
            QWEN3,
            {"auto_map": {"AutoConfig": "them/repo--configuration_x.X", "AutoModel": "m.X"}},
            "auto_map: expected ",
        ),
        (LLAMA, {"auto_map": {"AutoConfig": "configuration_x.X"}}, "auto_map: expected .*a LlamaForCausalLM alike"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act: expected 'silu'.*got 'gelu'"),
        (LLAMA, {"qkv_bias": True}, "qkv_bias: expected None or absent .vLLM would.*got True"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window: expected None or absent .vLLM would.*got 4096"),
        (LLAMA, {"layer_types": ["full_attention"] * 16}, "layer_types: expected "),
        (LLAMA, {"is_causal": False}, "is_causal: expected .*got False"),
        (LLAMA, {"attention_bias": None}, "attention_bias: expected bool.*got None"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_scaling.rope_type: expected .*got 'dynamic'",
        ),
        (LLAMA, {"mlp_bias": 1}, "mlp_bias: expected bool.*got 1"),
        (MISTRAL, {"attention_bias": True}, "attention_bias: expected False or absent .vLLM would.*got True"),
        (MISTRAL, {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling: expected "),
        (MISTRAL, {"sliding_window": 0}, "sliding_window: expected a positive.*got 0"),
        (
            MISTRAL,
            {"layer_types": ["full_attention"] * 32},
            "layer_types: expected .*every layer has the window, or none",
        ),
        (
            GEMMA3,
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping: expected .*transformers and vLLM both.*got 50.0",
        ),
        (GEMMA3, {"final_logit_softcapping": 0.0}, "final_logit_softcapping: expected a positive.*got 0.0"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation: expected 'gelu_pytorch_tanh'.*got 'gelu'"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected .*got True"),
        (GEMMA3, {"sliding_window": None}, "sliding_window: expected int.*got None"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern: expected .*got 0"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive.*got 0.0"),
        (GEMMA3, {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures: expected "),
        (
            without(GEMMA3, "rope_scaling", "rope_theta", "rope_local_base_freq"),
            {"rope_parameters": {"full_attention": YARN | {"truncate": False}}},
            "full_attention.truncate: expected true or absent",
        ),
        (GEMMA3, {"rope_parameters": NESTED}, "rope_scaling: expected absent, because rope_parameters"),
        (
            without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling"),
            {"rope_parameters": NESTED | {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention: expected .*local layers are not scaled",
        ),
        (
            without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling"),
            {"rope_parameters": NESTED | {"chunked_attention": {}}},
            "rope_parameters.chunked_attention: expected ",
        ),
        (
            without(GEMMA3, "rope_theta", "rope_local_base_freq", "rope_scaling"),
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters.rope_type: expected full_attention and sliding_attention only.*got 'default'",
        ),
        (
            GEMMA2,
            {"tie_word_embeddings": False},
            "tie_word_embeddings: expected True or absent .vLLM has no.*got False",
        ),
        (GEMMA2, {"sliding_window_pattern": 3}, "sliding_window_pattern: expected 2 or absent.*got 3"),
        (GEMMA2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping: expected a positive.*got -1.0"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act: expected .*got 'gelu'"),
        (
            QWEN3,
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_scaling.rope_type: expected .*got 'dynamic'",
        ),
        (QWEN3, {"rope_parameters": {"type": "longrope"}}, "rope_parameters.type: expected .*got 'longrope'"),
        (QWEN3, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.factor: expected a float.*got 2"),
        (
            QWEN3,
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "rope_scaling.factor: expected a num.*got 0.5",
        ),
        (
            QWEN3,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1}},
            "rope_scaling.alpha: expected .*got 1",
        ),
        (
            QWEN3,
            {"rope_scaling": {"type": "yarn", "rope_type": "linear"}},
            "rope_scaling.type: expected .*got 'yarn'",
        ),
        (QWEN3, {"rope_scaling": YARN | {"factor": None}}, "rope_scaling.factor: expected .*got None"),
        (QWEN3, {"rope_scaling": YARN | {"factor": 1.1}}, "rope_scaling.factor: expected at least .* = 1.25.*got 1.1"),
        (QWEN3, {"rope_scaling": YARN | {"beta_fast": None}}, "rope_scaling.beta_fast: expected .*got None"),
        (
            QWEN3,
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}},
            "rope_scaling: expected .*the same",
        ),
        (
            QWEN3,
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            "original_max_position_emb",
        ),
        (QWEN3, {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor: expected "),
        (QWEN3, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (QWEN3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta: expected one value"),
        (QWEN3, {"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention: expected "),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "layer_types: expected .*use_sliding_window"),
        (QWEN3, {"layer_types": ["full_attention"] * 27}, "layer_types"),
        (QWEN3, {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window: expected .*got 0"),
        (
            without(QWEN2, "max_window_layers"),
            {"use_sliding_window": True},
            "max_window_layers: expected .* is missing",
        ),
        (QWEN2, WINDOWS | {"max_window_layers": 24}, "layer_types: expected .*max_window_layers = 24"),
        (
            MOE,
            {"use_sliding_window": True, "sliding_window": 8} | MIXED,
            "layer_types: expected .*Qwen3-MoE windows every",
        ),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step: expected .*got 2"),
        (MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers: expected .*got \[0\]"),
        (MOE, {"attention_bias": True}, "attention_bias: expected .*vLLM.*got True"),
        (MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most 128.*got 129"),
        (MOE, {"moe_intermediate_size": 0}, "moe_intermediate_size: expected .*got 0"),
        (MOE, {"num_local_experts": 64}, "num_experts: expected num_local_experts, 64.*got 128"),
        (without(MOE, "norm_topk_prob"), {}, "norm_topk_prob: expected .* is missing"),
        (QWEN3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
        (QWEN3, {"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
        (QWEN3, {"attention_dropout": 0.1}, "attention_dropout: expected .*got 0.1"),
        (QWEN3, {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 16.*got 3"),
        (QWEN3, {"head_dim": 127}, "head_dim: expected an even.*got 127"),
        (QWEN3, {"vocab_size": "151936"}, "vocab_size: expected int.*got '151936'"),
        (QWEN3, {"num_hidden_layers": 0}, "num_hidden_layers: expected a positive.*got 0"),
        (QWEN3, {"rms_norm_eps": 0}, "rms_norm_eps: expected a positive.*got 0.0"),
        (QWEN2, {"hidden_size": 897}, "hidden_size: expected a multiple of 14.*got 897"),
        (without(QWEN3, "rope_theta"), {}, "rope_theta: expected .* missing"),
        (without(QWEN3, "head_dim"), {}, "head_dim: expected .* is missing"),
        (without(QWEN3, "tie_word_embeddings"), {}, "tie_word_embeddings: expected .* is missing"),
        (without(QWEN3, "attention_bias"), {}, "attention_bias: expected .* is missing"),
    ],
)
def test_from_hf_config_it_does_not_compute_is_refused_by_field(base, change, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf(base | change)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(sliding_window=4), "sliding_window: expected .*got 4"),
        (dict(sliding_window=4, windowed_layers=(True,)), "layer_types: expected "),
        (dict(num_experts=4), "num_experts: expected 0 for qwen3.*got 4"),
        (dict(logit_soft_cap=30.0), "final_logit_softcapping: expected None for qwen3.*got 30.0"),
        (dict(mlp_bias=True), "mlp_bias: expected False for qwen3.*got True"),
        (dict(local_rope_theta=1e4), "rope_local_base_freq: expected none for qwen3.*got 10000.0"),
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
    with pytest.raises(ValueError, match="expected a JSON object"):
        Architecture.from_hf(tmp_path / "config.json")


@pytest.mark.parametrize("named", [None, {}, {"AutoTokenizer": ["mine.Slow", None]}, {"AutoProcessor": "mine.P"}])
def test_own_code_of_a_tokenizer_is_no_reason_to_refuse_a_model(named):
    assert Architecture.from_hf(QWEN3 | {"auto_map": named}).model_type == "qwen3"
