"""Every published size: its parameters are counted against transformers and against the model card."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bridge.names import flatten
from configs.model_sizes import MODEL_SIZES
from learner.model.config import Architecture
from learner.model.decoder import abstract_params

MILLIONS = {  # of parameters, from the model cards and papers; a tied head counts once
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
}


def test_every_published_size_is_counted():
    assert set(MODEL_SIZES) == set(MILLIONS)


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_parameters_of_a_published_size_are_transformers_own(name):
    config = Architecture.from_hf(MODEL_SIZES[name])
    with torch.device("meta"):
        fields = {k: v for k, v in MODEL_SIZES[name].items() if k != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.family, **fields))
    want = {key: tuple(p.shape) for key, p in model.named_parameters()}
    if config.num_experts:  # transformers fuses the experts in memory, not in files
        want = dict(unfused(want))
    shapes = {path: np.broadcast_to(0, spec.shape) for path, spec in flatten(abstract_params(config)).items()}
    got = {key: tensor.shape for key, tensor in config.param_names.iter_tensors(shapes)}
    assert got == want
    assert round(sum(math.prod(shape) for shape in got.values()) / 1e6) == MILLIONS[name]


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
