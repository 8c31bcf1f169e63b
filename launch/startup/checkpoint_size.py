"""Size of a checkpoint on disk."""

import pathlib

from configs.schema import Config
from learner.model.architecture import Architecture

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number by dtype."""


def checkpoint_bytes(config: Config, model_folder: pathlib.Path, num_params: int, *, are_adapters: bool) -> int:
    """Returns the bytes of one checkpoint of the trained parameters; norms, biases and routers count as matrices."""
    model = Architecture.from_hf(model_folder)
    embeddings = 0 if are_adapters else model.vocab_size * model.hidden_size * (2 - model.tie_word_embeddings)
    num_other = min(embeddings, num_params)
    moments = config.optimizer.state_bytes(num_matrix=num_params - num_other, num_other=num_other)
    return num_params * BYTES[config.model.param_dtype] + moments
