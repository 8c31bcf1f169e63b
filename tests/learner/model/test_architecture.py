import dataclasses
import math
import subprocess
import sys

import pytest

from learner.model.architecture import Architecture
from learner.model.families.config_fields import RopeScaling
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
    YARN,
    without,
)


def test_from_hf_qwen3_reads_every_shape():
    c = Architecture.from_hf(QWEN3)
    assert (c.model_type, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim) == ("qwen3", 28, 16, 8, 128)
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


@pytest.mark.integration
def test_config_import_brings_in_no_jax():
    code = "import sys, learner.model.architecture; assert not {'jax', 'flax', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
