"""Looks at everything a run needs before anything starts; jax and torch stay unloaded."""

import json
import pathlib
import shutil

from configs.run_folder import snapshot_root
from configs.schema import Config
from learner.data.problems import load_file, load_held_out
from learner.data.tokenizer import load_tokenizer
from learner.model.config import Architecture


def check(config: Config, model_folder: pathlib.Path) -> list[str]:
    """Checks the model folder, the tokenizer, the prompts and the room for snapshots; returns what to know.

    Raises:
      ValueError: one line that says what is wrong and what to do.
    """
    if not model_folder.is_dir():
        raise ValueError(f"no model folder {str(model_folder)!r} (model.path)")
    try:
        model = Architecture.from_hf(model_folder)
    except FileNotFoundError as e:
        raise ValueError(str(e)) from e
    missing = _missing_weights(model_folder)
    if missing:
        raise ValueError(f"{model_folder} has no weights: {missing}")
    if config.model.max_tokens > model.max_position_embeddings:
        raise ValueError(
            f"model.max_tokens ({config.model.max_tokens}) is more than the model's max_position_embeddings "
            f"({model.max_position_embeddings})"
        )
    tokenizer = load_tokenizer(model_folder, vocab_size=model.vocab_size)
    if config.prompts.chat_template == "on" and not tokenizer.chat_template:
        raise ValueError(f"{model_folder} has no chat template; set prompts.chat_template=auto or off")
    notes = []
    if config.prompts.path:
        train, held_out, bad = load_file(config, tokenizer)
        notes.append(f"{config.prompts.path}: {len(train)} problems to train on, {len(held_out)} held out")
        if len(held_out) < config.evaluation.num_problems:
            notes.append(
                f"warning: evaluation.num_problems is {config.evaluation.num_problems}, only {len(held_out)} are there"
            )
        if bad:
            notes.append(f"warning: {len(bad)} rows set aside, see quarantine.jsonl; row {bad[0].row}: {bad[0].reason}")
    else:
        load_held_out(config, tokenizer)
    _check_room(config, model_folder)
    return notes


def _missing_weights(folder: pathlib.Path) -> str:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "" if (folder / "model.safetensors").is_file() else "no model.safetensors, and no index of several"
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{index} is no index of safetensors files: {e!r}") from e
    gone = [f for f in files if not (folder / f).is_file()]
    return f"{', '.join(gone)} of its index" if gone else ""


def _check_room(config: Config, model_folder: pathlib.Path) -> None:
    """Two snapshot slots and an actor's copy, at most as large as the files."""
    num_bytes = sum(f.stat().st_size for f in model_folder.glob("*.safetensors"))
    folder = snapshot_root(config).absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < 3 * num_bytes:
        raise ValueError(
            f"{existing} has {free / 2**30:.1f} GiB free, snapshots need about {3 * num_bytes / 2**30:.1f} GiB; "
            "set publish.snapshot_dir to a folder with room"
        )
