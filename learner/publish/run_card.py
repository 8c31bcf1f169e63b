"""Run card: the config and files that an actor without access to the learner's folder needs; weights are snapshots."""

import json
import pathlib
from collections.abc import Mapping

from blake3 import blake3

from bridge import weight_types
from bridge.files import BASE_FILE
from bridge.param_names import TensorNames, flatten
from bridge.snapshots.shard_map import lay_out
from bridge.store.sql.learner_side import LearnerStore
from bridge.text.template_files import named_template_files
from bridge.weight_types import CardFile, RunCard
from configs.overrides import to_json
from configs.run_folder import run_id
from configs.schema import Config
from learner.model.architecture import Architecture
from learner.model.decoder import Params
from learner.model.lora import LoraBase
from learner.publish.open_publisher import published_names

ENGINE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
)
"""Files of a model folder that an engine and a tokenizer read besides the weights; no code."""


def make_run_card(
    *,
    run: str,
    name: str,
    config: str,
    model_folder: pathlib.Path,
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    base: str = "",
) -> tuple[RunCard, dict[str, bytes]]:
    """Returns the run card, and its files by their hashes; raises ValueError if a file is too large for the store.

    `shapes` are those of the learner's stacked parameters, by path. `base` is the hash of the base weights of published
    adapters (`bridge.files`), which an actor must have; empty if all weights are published.
    """
    blobs: dict[str, bytes] = {}
    files: list[CardFile] = []
    found = {file: model_folder / file for file in ENGINE_FILES} | named_template_files(model_folder)
    contents = {file: path.read_bytes() for file, path in found.items() if path.is_file()}
    if base:
        contents[BASE_FILE] = json.dumps({"blake3": base}).encode()
    for file, data in contents.items():
        digest = blake3(data).hexdigest()
        blobs[digest] = data
        files.append(CardFile(name=file, num_bytes=len(data), blake3=digest))
    tensors, _ = lay_out(
        (hf_name, dtype, shapes[path][len(names.stack(path)) :])
        for path in names.paths()
        for hf_name in names.hf_names(path)
    )
    card = RunCard(
        run=run,
        name=name,
        config=config,
        files=tuple(files),
        tensors=tensors,
        sluice=weight_types.SLUICE,
        vllm=weight_types.VLLM,
    )
    return card, blobs


def put_run_card(
    store: LearnerStore,
    config: Config,
    folder: pathlib.Path,
    model_folder: pathlib.Path,
    architecture: Architecture,
    params: Params,
    base: LoraBase | None = None,
) -> None:
    """Stores the run card for actors that share no folder with this learner.

    `params` are the learner's parameters; if they are adapters, `base` is their base.
    """
    is_merged = base is not None and not config.publishes_adapters
    published = base.params if base is not None and is_merged else params
    card, blobs = make_run_card(
        run=run_id(folder),
        name=config.run.name,
        config=to_json(config),
        model_folder=model_folder,
        names=published_names(architecture, config),
        shapes={path: tuple(leaf.shape) for path, leaf in flatten(published).items()},
        dtype=config.model.served_dtype,
        base=base.metadata["base"] if base is not None and config.publishes_adapters else "",
    )
    store.put_run_card(card, blobs)
