import dataclasses
import json
import subprocess
import sys

import pytest

from learner.model.config import ModelConfig

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


def without(raw, *fields):
    return {k: v for k, v in raw.items() if k not in fields}


def test_from_hf_qwen3_reads_every_shape():
    c = ModelConfig.from_hf(QWEN3)
    assert (c.family, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == ("qwen3", 28, 16, 8, 128)
    assert (c.vocab_size, c.hidden_size, c.intermediate_size) == (151936, 1024, 3072)
    assert (c.rope_theta, c.rms_norm_eps, c.max_position_embeddings) == (1e6, 1e-6, 40960)
    assert (c.qk_norm, c.qkv_bias, c.o_bias, c.tie_word_embeddings) == (True, False, False, True)
    biased = ModelConfig.from_hf(QWEN3 | {"attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_from_hf_qwen2_divides_head_dim_and_biases_only_qkv():
    c = ModelConfig.from_hf(QWEN2)
    assert (c.head_dim, c.qk_norm, c.qkv_bias, c.o_bias) == (64, False, True, False)
    assert ModelConfig.from_hf(QWEN2 | {"head_dim": 32}).head_dim == 32
    assert ModelConfig.from_hf(QWEN2 | {"head_dim": None}).head_dim == 64


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
    assert ModelConfig.from_hf(without(QWEN3, "rope_theta", "rope_scaling") | rope).rope_theta == 5e5


@pytest.mark.parametrize(
    "base,change,message",
    [
        (QWEN3, {"model_type": "llama"}, r"model_type: got 'llama', wanted one of \['qwen2', 'qwen3'\]"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type: got 'yarn'"),
        (QWEN3, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type: got 'linear'"),
        (QWEN3, {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters.rope_type: got 'llama3'"),
        (QWEN3, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (QWEN3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta: got .*wanted one value"),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window: got True"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
        (QWEN3, {"layer_types": ["full_attention"] * 27}, "layer_types"),
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
        ModelConfig.from_hf(base | change)


def test_from_hf_sliding_window_that_no_layer_uses_is_accepted():
    assert ModelConfig.from_hf(QWEN2 | {"use_sliding_window": True, "max_window_layers": 24}).num_layers == 24


def test_from_hf_missing_or_broken_file_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model config at"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="wanted an object"):
        ModelConfig.from_hf(tmp_path / "config.json")


@pytest.mark.parametrize("raw", [QWEN2, QWEN3])
def test_to_hf_returns_what_was_read(raw, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_hf(tmp_path)
    assert config.to_hf() == raw and hash(config) == hash(ModelConfig.from_hf(raw))


@pytest.mark.parametrize("raw", [QWEN2, QWEN3, without(QWEN3, "rope_theta") | {"rope_parameters": {"rope_theta": 1e6}}])
def test_to_hf_of_a_changed_config_rewrites_that_field_and_keeps_the_rest(raw):
    raw = raw | {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    changed = dataclasses.replace(ModelConfig.from_hf(raw), num_layers=2, rope_theta=7.0, tie_word_embeddings=False)
    assert ModelConfig.from_hf(changed.to_hf()) == changed
    assert without(changed.to_hf(), "num_hidden_layers", "rope_theta", "rope_parameters", "layer_types") == without(
        raw | {"tie_word_embeddings": False},
        "num_hidden_layers",
        "rope_theta",
        "rope_parameters",
        "layer_types",
    )


@pytest.mark.parametrize("raw", [QWEN2, QWEN3])
def test_to_hf_of_a_config_made_in_code_reads_back_equal(raw):
    made = dataclasses.replace(ModelConfig.from_hf(raw), hf_json="{}")
    assert ModelConfig.from_hf(made.to_hf()) == made


@pytest.mark.integration
def test_config_import_brings_in_no_jax():
    code = "import sys, learner.model.config; assert not {'jax', 'flax', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
