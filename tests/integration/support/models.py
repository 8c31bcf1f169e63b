"""Tiny random Hugging Face folders, and what transformers itself computes with their weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

Family = Literal["qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma2", "gemma3_text"]
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
VOCAB_SIZE = 128


# Windows shorter than what the tests sample, caps that bend scores of this size, and the rotations of each family.
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_GEMMA: dict[str, Any] = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "gemma3_text": _GEMMA
    | {"rope_parameters": _TWO_ROPES, "sliding_window_pattern": 2, "final_logit_softcapping": 4.0},
}


def make_folder(path: Path, *, family: Family = "qwen3", tied: bool, seed: int = 0, dtype: str = "float32") -> Path:
    """A 2-layer model of the family with random weights (biases and norms too) and a character tokenizer.

    Windows are of 16 tokens, soft caps of 2 (scores) and 4 (logits), where the family has such.
    """
    import torch
    import transformers

    vocab = make_tokenizer(path)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": vocab["<eos>"],
        "pad_token_id": vocab["<pad>"],
        "bos_token_id": None,
    }
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            head_dim=32,  # pyright: ignore[reportCallIssue]  # taken as any further field
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            **sizes,
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    elif family == "qwen3":
        config = transformers.Qwen3Config(head_dim=32, **sizes)
        model = transformers.Qwen3ForCausalLM(config)
    elif family == "qwen2":
        config = transformers.Qwen2Config(**sizes)
        model = transformers.Qwen2ForCausalLM(config)
    else:
        config = transformers.AutoConfig.for_model(family, **sizes, **_OF_FAMILY[family])
        model = transformers.AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=random)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def make_tokenizer(path: Path) -> dict[str, int]:
    """Writes a character tokenizer; returns its vocabulary."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate([*CHARACTERS, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(path)
    return vocab


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The folder's tensors."""
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


def perturbed(weights: Mapping[str, np.ndarray], *, seed: int, scale: float = 0.05) -> dict[str, np.ndarray]:
    """The weights plus noise: every tensor changes."""
    random = np.random.default_rng(seed)
    return {name: (w + scale * random.standard_normal(w.shape)).astype(w.dtype) for name, w in weights.items()}


def random_adapters(table: Mapping[str, tuple[str, tuple[int, ...]]], *, seed: int) -> dict[str, np.ndarray]:
    """Adapters that change much, by PEFT's names."""
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.2, shape).astype(np.float32) for name, (_, shape) in table.items()}


def merged(
    base: Mapping[str, np.ndarray], adapters: Mapping[str, np.ndarray], *, scale: float
) -> dict[str, np.ndarray]:
    """W + s B A, in float64."""
    found = dict(base)
    for name, a in adapters.items():
        if name.endswith(".lora_A.weight"):
            b = adapters[name.replace("lora_A", "lora_B")].astype(np.float64)
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            found[weight] = (base[weight] + scale * b @ a.astype(np.float64)).astype(np.float32)
    return found


def reference_logprobs(
    path: Path, weights: Mapping[str, np.ndarray], tokens: np.ndarray, *, temperature: float = 1.0
) -> np.ndarray:
    """log p(tokens[i] | tokens[:i]) for i >= 1 by transformers in float32, with these weights in the folder's model."""
    import torch

    logits = _reference(path, weights, tokens).logits[0, :-1] / temperature
    logprobs = torch.log_softmax(logits, -1).numpy()
    return logprobs[np.arange(len(tokens) - 1), tokens[1:]]


def reference_router_logits(path: Path, weights: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """[tokens, layers, experts] by transformers in float32, with these weights in the folder's model."""
    output = _reference(path, weights, tokens, output_router_logits=True)
    return np.stack([layer.numpy() for layer in output.router_logits], axis=1)


def _reference(path: Path, weights: Mapping[str, np.ndarray], tokens: np.ndarray, **options: Any) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    state = {name: torch.from_numpy(w.astype(np.float32)) for name, w in _with_joined_experts(weights).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None], **options)


def learner_params(path: Path, weights: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    """The learner's architecture of the folder's model, and its parameters with these weights."""
    from bridge.param_names import flatten, unflatten
    from learner.model.architecture import Architecture
    from learner.model.decoder import abstract_params

    architecture = Architecture.from_hf(path)
    leaves = {
        name: np.stack([weights[part] for part in architecture.param_names.hf_names(name)]).reshape(leaf.shape)
        for name, leaf in flatten(abstract_params(architecture)).items()
    }
    return architecture, unflatten(leaves)


def near_ties(weights: Mapping[str, np.ndarray], *, seed: int, noise: float) -> dict[str, np.ndarray]:
    """The weights with routers whose experts have nearly equal rows, with relative noise between them."""
    random = np.random.default_rng(seed)
    found = dict(weights)
    for name, weight in weights.items():
        if name.endswith(".mlp.gate.weight"):
            rows = weight[:1] * (1 + noise * random.standard_normal(weight.shape))
            found[name] = rows.astype(weight.dtype)
    return found


def _with_joined_experts(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as transformers holds them in memory: all of a layer in one tensor, gate above up."""
    joined: dict[str, np.ndarray] = {}
    experts: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    for name, weight in weights.items():
        layer, found, rest = name.partition(".experts.")
        if not found:
            joined[name] = weight
            continue
        number, part, _ = rest.split(".")
        experts.setdefault(f"{layer}.experts", {}).setdefault(part, {})[int(number)] = weight
    for prefix, parts in experts.items():
        gate, up, down = (
            np.stack([parts[p][i] for i in sorted(parts[p])]) for p in ("gate_proj", "up_proj", "down_proj")
        )
        joined[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        joined[f"{prefix}.down_proj"] = down
    return joined
