"""The published Qwen models, as the fields of their config.json: shapes to compile, count and test with.

Only what decides the shape and the numbers of a model is here: no token ids, dtypes or file versions. The
Qwen2.5 entries are the base models, the Qwen3 entries the post-trained ones (same shapes as their base models).
"""

from typing import Any

_QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_window_layers": layers,
        "tie_word_embeddings": tied,
    }


def _context(tokens: int, vocab_size: int) -> dict[str, Any]:
    """Qwen2.5: the window is as long as the context, and not used."""
    return {"max_position_embeddings": tokens, "sliding_window": tokens, "vocab_size": vocab_size}


MODEL_SIZES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _QWEN2_5 | _shape(896, 4864, 24, 14, 2, tied=True) | _context(32768, 151936),
    "Qwen2.5-1.5B": _QWEN2_5 | _shape(1536, 8960, 28, 12, 2, tied=True) | _context(131072, 151936),
    "Qwen2.5-3B": _QWEN2_5 | _shape(2048, 11008, 36, 16, 2, tied=True) | _context(32768, 151936),
    "Qwen2.5-7B": _QWEN2_5 | _shape(3584, 18944, 28, 28, 4, tied=False) | _context(131072, 152064),
    "Qwen2.5-14B": _QWEN2_5
    | _shape(5120, 13824, 48, 40, 8, tied=False)
    | _context(131072, 152064)
    | {"rms_norm_eps": 1e-5},
    "Qwen2.5-32B": _QWEN2_5
    | _shape(5120, 27648, 64, 40, 8, tied=False)
    | _context(131072, 152064)
    | {"rms_norm_eps": 1e-5},
    "Qwen3-0.6B": _QWEN3 | _shape(1024, 3072, 28, 16, 8, tied=True),
    "Qwen3-1.7B": _QWEN3 | _shape(2048, 6144, 28, 16, 8, tied=True),
    "Qwen3-4B": _QWEN3 | _shape(2560, 9728, 36, 32, 8, tied=True),
    "Qwen3-8B": _QWEN3 | _shape(4096, 12288, 36, 32, 8, tied=False),
    "Qwen3-14B": _QWEN3 | _shape(5120, 17408, 40, 40, 8, tied=False),
    "Qwen3-32B": _QWEN3 | _shape(5120, 25600, 64, 64, 8, tied=False),
    "Qwen3-30B-A3B": _QWEN3_MOE
    | _shape(2048, 6144, 48, 32, 4, tied=False)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
"""Name on the Hugging Face hub (without the organisation) -> config.json fields."""
