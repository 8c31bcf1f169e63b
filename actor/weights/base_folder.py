"""The weights that published adapters belong to (publish.lora=adapter): a folder on the actor's machine."""

import dataclasses
import json
import pathlib

from actor.weights.model_folder import ModelFolder, tensor_table
from bridge.adapter_names import adapter_table
from bridge.weights_digest import BASE_FILE, weights_digest
from configs.schema import Config

_CONFIG = "config.json"


def for_adapters(model: ModelFolder, config: Config) -> ModelFolder:
    """A folder with all weights, as an actor serves it: what is published is the adapters.

    Raises:
      ValueError: the model lacks a matrix that is to have one.
    """
    if not config.publishes_adapters:
        return model
    tensors = adapter_table(model.tensors, modules=config.lora.modules, rank=config.lora.rank)
    return dataclasses.replace(model, tensors=tensors, base=model.tensors)


def with_base(model: ModelFolder, config: Config) -> ModelFolder:
    """A card's model with the base's weights of this machine, if adapters are published.

    Raises:
      ValueError: they are not there, or not the learner's; one line says which folder, and what to do.
    """
    if not config.publishes_adapters:
        return model
    folder = pathlib.Path(config.actor.base_path or config.model.path).expanduser()
    what_to_do = (
        "give --config.actor.base_path=FOLDER with the learner's base, or let it publish with publish.lora=merged"
    )
    if not (config.actor.base_path or config.model.path) or not (folder / _CONFIG).is_file():
        raise ValueError(f"the run publishes adapters alone, and their base is not in {folder} here: {what_to_do}")
    wanted = json.loads((model.path / BASE_FILE).read_text())["blake3"]
    if (folder / _CONFIG).read_bytes() != (model.path / _CONFIG).read_bytes() or weights_digest(folder) != wanted:
        raise ValueError(f"the weights in {folder} are not the base of the run's adapters: {what_to_do}")
    base = tensor_table(folder, dtype=config.model.served_dtype)
    return dataclasses.replace(model, base=base, weights=folder)
