"""Every published size: its parameters are counted against transformers and against the model card."""

import math

import numpy as np
import pytest

from bridge.param_names import flatten
from configs.model_sizes import MODEL_SIZES
from learner.model.architecture import Architecture
from learner.model.decoder import abstract_params
from tests.learner.model.tiny import SIZES
from tests.param_tensors import iter_tensors
from tests.support.lazy import torch, transformers

# Of parameters; a tied head counts once. Qwen, SmolLM2, Mistral and Gemma 2: the safetensors totals of the model cards.
# Llama: the model cards of Llama 2, 3.1 and 3.2 (6.74B, 8.03B, 70.6B, 1.23B and 3.21B), and the totals of their files.
# Gemma 3: table 1 of its technical report, as `NOT_EMBEDDED`, and the vocabulary times the width.
MILLIONS = {
    "Qwen2.5-0.5B": 494,
    "Qwen2.5-1.5B": 1544,
    "Qwen2.5-3B": 3086,
    "Qwen2.5-7B": 7616,
    "Qwen2.5-14B": 14770,
    "Qwen2.5-32B": 32764,
    "Qwen3-0.6B": 596,
    "Qwen3-1.7B": 1721,
    "Qwen3-4B": 4022,
    "Qwen3-8B": 8191,
    "Qwen3-14B": 14768,
    "Qwen3-32B": 32762,
    "Qwen3-30B-A3B": 30532,
    "SmolLM2-135M": 135,
    "SmolLM2-360M": 362,
    "SmolLM2-1.7B": 1711,
    "Llama-2-7b-hf": 6738,
    "Llama-3.1-8B": 8030,
    "Llama-3.1-70B": 70554,
    "Llama-3.2-1B": 1236,
    "Llama-3.2-3B": 3213,
    "Mistral-7B-v0.1": 7242,
    "Mistral-7B-v0.3": 7248,
    "gemma-2-2b": 2614,
    "gemma-2-9b": 9242,
    "gemma-3-1b-pt": 1000,
    "gemma-3-4b-pt-text": 3880,
    "gemma-3-12b-pt-text": 11766,
    "gemma-3-27b-pt-text": 27009,
}
NOT_EMBEDDED = {  # millions, Gemma 2's report (table 1) and Gemma 3's
    "gemma-2-2b": 2024,
    "gemma-2-9b": 8324,
    "gemma-3-1b-pt": 698,
    "gemma-3-4b-pt-text": 3209,
    "gemma-3-12b-pt-text": 10759,
    "gemma-3-27b-pt-text": 25600,
}


def test_every_published_size_is_counted():
    assert set(MODEL_SIZES) == set(MILLIONS)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_of_a_published_size_are_transformers_own(name):
    config = Architecture.from_hf(MODEL_SIZES[name])
    with torch.device("meta"):
        fields = {k: v for k, v in MODEL_SIZES[name].items() if k != "model_type"}
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config.model_type, **fields)
        )
    want = {key: tuple(p.shape) for key, p in model.named_parameters()}
    if config.num_experts:  # transformers fuses the experts in memory, not in files
        want = dict(unfused(want))
    shapes = {path: np.broadcast_to(0, spec.shape) for path, spec in flatten(abstract_params(config)).items()}
    got = {key: tensor.shape for key, tensor in iter_tensors(config.param_names, shapes)}
    assert got == want
    count = sum(math.prod(shape) for shape in got.values())
    assert round(count / 1e6) == MILLIONS[name]
    embedded = math.prod(got["model.embed_tokens.weight"])
    assert abs(count - embedded - NOT_EMBEDDED.get(name, (count - embedded) / 1e6) * 1e6) < 1e6


def unfused(shapes):
    for key, shape in shapes.items():
        prefix, _, kind = key.rpartition(".")
        if kind == "gate_up_proj":
            experts, width, hidden = shape
            for j in range(experts):
                yield f"{prefix}.{j}.gate_proj.weight", (width // 2, hidden)
                yield f"{prefix}.{j}.up_proj.weight", (width // 2, hidden)
        elif key.endswith("experts.down_proj"):
            yield from ((f"{prefix}.{j}.down_proj.weight", shape[1:]) for j in range(shape[0]))
        else:
            yield key, shape
