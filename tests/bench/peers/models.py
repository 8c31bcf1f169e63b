"""The models that the sides of the learner bench train: configurations and fresh weights. numpy and safetensors only.

`small` is a Qwen3 of 8 layers, width 256, 32768 words, tied: 16.3M parameters, which the batches of mixed lengths use.
`smollm2` has the shape of SmolLM2-135M, Llama: 134.5M parameters. Its weights are drawn; speed doesn't depend on them.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

SMALL, SMOLLM2 = "small", "smollm2"

MODELS: dict[str, dict] = {
    SMALL: {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": 32768,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "dtype": "float32",
    },
    SMOLLM2: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    },
}
"""By name, a config.json each."""


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by Hugging Face's names, without their `.weight`."""
    dim, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_dim, kv_dim = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], dim), "model.norm": (dim,)}
    head_norms = {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (dim,),
            "self_attn.q_proj": (q_dim, dim),
            "self_attn.k_proj": (kv_dim, dim),
            "self_attn.v_proj": (kv_dim, dim),
            **(head_norms if config["model_type"] == "qwen3" else {}),
            "self_attn.o_proj": (dim, q_dim),
            "post_attention_layernorm": (dim,),
            "mlp.gate_proj": (mlp, dim),
            "mlp.up_proj": (mlp, dim),
            "mlp.down_proj": (dim, mlp),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def write_model(name: str, folder: pathlib.Path, seed: int = 0) -> int:
    """Writes config.json and model.safetensors; returns the number of parameters.

    Matrices are N(0, 0.02), norms 1 + N(0, 0.1): a norm that a side loads wrongly or forgets shows in the numbers.
    """
    rng = np.random.default_rng(seed)
    tensors = {
        f"{tensor}.weight": (rng.normal(0, 0.02, shape) if len(shape) == 2 else rng.normal(1, 0.1, shape)).astype("f4")
        for tensor, shape in tensor_shapes(MODELS[name]).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name], indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(t.size for t in tensors.values())
