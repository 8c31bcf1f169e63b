"""FLOPs against numbers worked out by hand, and against XLA's own count of a forward pass without loops or remat."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from configs.model_sizes import MODEL_SIZES
from configs.sections import LoraConfig
from learner.metrics.flops import TPU_CHIPS, adapter_params, matmul_params, model_flops, peak_flops
from learner.model.architecture import Architecture

QWEN3_0_6B = Architecture.from_hf(MODEL_SIZES["Qwen3-0.6B"])
QWEN3_MOE = Architecture.from_hf(MODEL_SIZES["Qwen3-30B-A3B"])


def test_matmul_params_of_a_mixture_counts_active_experts_and_the_router():
    # Hidden 2048, 32 query and 4 key heads of 128, 8 of 128 experts of width 768, 48 layers: about 3B active.
    attention = 2048 * 4096 * 2 + 2048 * 512 * 2
    experts, router = 8 * 3 * 2048 * 768, 2048 * 128
    assert matmul_params(QWEN3_MOE) == 48 * (attention + experts + router) == 2730491904


def test_model_flops_of_one_row_matches_numbers_by_hand():
    # Hidden 1024, 16 query and 8 key heads of 128, MLP 3072, 28 layers; 1000 tokens, 800 of them scored.
    projections, mlp = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024, 3 * 1024 * 3072
    matmul = 6 * 28 * (projections + mlp) * 1000
    head = 6 * 1024 * 151936 * 800
    attention = 3 * 28 * 16 * (2 * 128 + 2 * 128) * (1000 * 1000 // 2)
    got = model_flops(QWEN3_0_6B, num_tokens=1000, num_scored_tokens=800, sum_squared_lengths=1000**2)
    assert got == matmul + head + attention


def test_model_flops_are_three_times_those_of_xla_on_a_dense_forward():
    """A transformer written out here, layer by layer with whole attention; XLA counts its matmuls itself."""
    fields = MODEL_SIZES["Qwen3-0.6B"] | {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    c = Architecture.from_hf(fields)
    length, f32 = 128, jnp.float32

    def matrix(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, f32)

    layer = [matrix(256, 256), matrix(256, 128), matrix(256, 128), matrix(256, 256)]
    layer += [matrix(256, 768), matrix(256, 768), matrix(768, 256)]

    def forward(x, layers, head):
        for q, k, v, o, gate, up, down in layers:
            queries = (x @ q).reshape(length, 4, 64)
            keys = jnp.repeat((x @ k).reshape(length, 2, 64), 2, 1)
            values = jnp.repeat((x @ v).reshape(length, 2, 64), 2, 1)
            weights = jnp.einsum("qhd,khd->hqk", queries, keys)
            x = x + jnp.einsum("hqk,khd->qhd", weights, values).reshape(length, 256) @ o
            x = x + ((x @ gate) * (x @ up)) @ down
        return x @ head

    compiled = jax.jit(forward).lower(matrix(length, 256), [layer] * 2, matrix(256, 2048)).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    # XLA counts all pairs, twice those of a causal mask.
    got = model_flops(c, num_tokens=length, num_scored_tokens=length, sum_squared_lengths=2 * length**2) / 3
    assert got == pytest.approx(analysis["flops"], rel=0.02)


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_peak_flops_of_known_chips_is_the_data_sheets(kind, tflops):
    assert peak_flops(kind) == tflops * 1e12


@pytest.mark.parametrize("kind", ["cpu", "", "TPU v2", "NVIDIA GeForce RTX 4090", "NVIDIA L400"])
def test_peak_flops_of_an_unknown_chip_is_none(kind):
    assert peak_flops(kind) is None


def test_tpu_chips_peaks_agree_with_peak_flops():
    kinds = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
    assert {family: chip.flops_per_s for family, chip in TPU_CHIPS.items()} == {
        f: peak_flops(k) for f, k in kinds.items()
    }


def test_model_flops_of_adapters_leave_out_the_gradients_of_what_is_frozen():
    lora = LoraConfig(rank=16, targets="q,v,down")
    q, v, down = 1024 + 2048, 1024 + 1024, 3072 + 1024
    num = adapter_params(QWEN3_0_6B, lora)
    assert num == 28 * 16 * (q + v + down) == 4128768
    assert adapter_params(QWEN3_0_6B, LoraConfig()) == 0
    of: dict[str, Any] = dict(num_tokens=1000.0, num_scored_tokens=800.0, sum_squared_lengths=0.0)
    # Forward and the inputs' gradients through 440,401,920 parameters and the head; the adapters' own on top.
    layers, head, adapters = 2e3 * 440401920, 2 * 800 * 1024 * 151936, 2e3 * num
    assert model_flops(QWEN3_0_6B, **of, num_adapter_params=num) == pytest.approx(2 * (layers + head) + 3 * adapters)
    attention: dict[str, Any] = dict(num_tokens=0.0, num_scored_tokens=0.0, sum_squared_lengths=1e6)
    assert model_flops(QWEN3_0_6B, **attention, num_adapter_params=num) == model_flops(QWEN3_0_6B, **attention) > 0
