"""Published model shapes, and the recipe of the quickstart's tiny model.

Entries contain only fields that affect shape and numbers: no token ids, dtypes or file versions. Qwen2.5 entries are
base models. Qwen3 entries are post-trained models, with the shapes of their base models. Multimodal Gemma 3 entries
contain only the text model: their `text_config` as a config.json.

The tiny model learns its task from fresh problems. In a short last phase, random typos corrupt the supervised answers.
The model then knows the right answer but rarely samples it, so that reinforcement learning has something to improve.
"""

import dataclasses
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


_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
}
_LLAMA3: dict[str, Any] = _LLAMA | {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
_LLAMA3_2: dict[str, Any] = _LLAMA3 | {"rope_scaling": _LLAMA3["rope_scaling"] | {"factor": 32.0}}
_SMOLLM2: dict[str, Any] = _LLAMA | {"max_position_embeddings": 8192, "rope_theta": 100000, "vocab_size": 49152}
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
_GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
}
_GEMMA2: dict[str, Any] = _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
_GEMMA3: dict[str, Any] = _GEMMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
}
_GEMMA3_1B: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rope_scaling": None,
    "sliding_window": 512,
    "vocab_size": 262144,
}


def _plain_shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    """Returns the shape fields of a Qwen model, without windowed layers."""
    return _plain_shape(hidden, mlp, layers, heads, kv_heads, tied=tied) | {"max_window_layers": layers}


def _context(tokens: int, vocab_size: int) -> dict[str, Any]:
    """Returns the context fields of a Qwen2.5 model. The window spans the context and is unused."""
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
    "SmolLM2-135M": _SMOLLM2 | _plain_shape(576, 1536, 30, 9, 3, tied=True),
    "SmolLM2-360M": _SMOLLM2 | _plain_shape(960, 2560, 32, 15, 5, tied=True),
    "SmolLM2-1.7B": _SMOLLM2 | _plain_shape(2048, 8192, 24, 32, 32, tied=True) | {"rope_theta": 130000},
    "Llama-2-7b-hf": {k: v for k, v in _LLAMA.items() if "bias" not in k and k != "attention_dropout"}
    | _plain_shape(4096, 11008, 32, 32, 32, tied=False)
    | {"max_position_embeddings": 4096, "rope_scaling": None, "vocab_size": 32000},
    "Llama-3.1-8B": _LLAMA3 | _plain_shape(4096, 14336, 32, 32, 8, tied=False),
    "Llama-3.1-70B": _LLAMA3 | _plain_shape(8192, 28672, 80, 64, 8, tied=False),
    "Llama-3.2-1B": _LLAMA3_2 | _plain_shape(2048, 8192, 16, 32, 8, tied=True) | {"head_dim": 64},
    "Llama-3.2-3B": _LLAMA3_2 | _plain_shape(3072, 8192, 28, 24, 8, tied=True) | {"head_dim": 128},
    "Mistral-7B-v0.1": _MISTRAL
    | _plain_shape(4096, 14336, 32, 32, 8, tied=False)
    | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
    "Mistral-7B-v0.3": _MISTRAL
    | _plain_shape(4096, 14336, 32, 32, 8, tied=False)
    | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "gemma-2-2b": _GEMMA2 | _plain_shape(2304, 9216, 26, 8, 4, tied=True),
    "gemma-2-9b": _GEMMA2 | _plain_shape(3584, 14336, 42, 16, 8, tied=True),
    "gemma-3-1b-pt": _GEMMA3 | _plain_shape(1152, 6912, 26, 4, 1, tied=True) | _GEMMA3_1B,
    "gemma-3-4b-pt-text": _GEMMA3 | _plain_shape(2560, 10240, 34, 8, 4, tied=True),
    "gemma-3-12b-pt-text": _GEMMA3 | _plain_shape(3840, 15360, 48, 16, 8, tied=True),
    "gemma-3-27b-pt-text": _GEMMA3
    | _plain_shape(5376, 21504, 62, 32, 16, tied=True)
    | {"head_dim": 128, "query_pre_attn_scalar": 168},
}
"""config.json fields by name on the Hugging Face Hub (without the organization)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModelRecipe:
    """Recipe of the tiny checkpoint, except for its task (`config.prompts`)."""

    revision: int = 1
    """Revision, incremented when the code changes the checkpoint."""
    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = True
    embedding_std: float = 0.1
    kernel_gain: float = 0.7
    """Gain of initial kernels, N(0, (gain / sqrt(fan_in))^2)."""
    seed: int = 0
    batch_size: int = 128
    num_clean_steps: int = 450
    learning_rate: float = 4e-3
    """Peak learning rate of the clean steps: 50 steps of linear warm-up, then cosine decay to 0."""
    num_typo_steps: int = 60
    typo_learning_rate: float = 1e-3
    """Initial learning rate of the typo steps, with linear decay to 0."""
    typo_rate: float = 0.3
    """Probability that a character of an answer, or its end, is replaced."""
    program_typo_rate: float = 0.04
    """Typo probability per character of a program. Lower, because about thirty characters must all be right."""
