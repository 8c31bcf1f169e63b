"""Whether a folder is a model that can be trained, and which of its files belong to one."""

import pathlib
import re

from launch.preflight import missing_weights
from learner.data.tokenizer import load_tokenizer
from learner.model.config import Architecture

PATTERNS = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    "model.safetensors.index.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "additional_chat_templates/*.jinja"),
    *("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model"),
    *("LICENSE*", "LICENCE*", "README.md", "NOTICE*"),
)
"""Names of the files that are a model, its tokenizer and its licence; other formats of the weights are left."""

_LICENCE = re.compile(r"^licen[cs]e:[ \t]*(\S.*)$", re.MULTILINE)


def check_computed(folder: pathlib.Path) -> Architecture:
    """Checks a folder's config.json alone: the learner computes such a model.

    Raises:
      ValueError: there is none, or one line that names what the learner doesn't compute.
    """
    try:
        return Architecture.from_hf(folder)
    except FileNotFoundError as e:
        raise ValueError(str(e)) from e


def check_trainable(folder: pathlib.Path) -> None:
    """Checks a model's folder: a family that the learner computes, all weights, a tokenizer that fits.

    Raises:
      ValueError: one line that says what is missing, or names what the learner doesn't compute.
    """
    model = check_computed(folder)
    if missing := missing_weights(folder):
        raise ValueError(f"{folder} has no weights: {missing}")
    load_tokenizer(folder, vocab_size=model.vocab_size)


def licence_of(folder: pathlib.Path) -> str:
    """What the folder's own files say of its licence."""
    if texts := sorted(p.name for p in folder.glob("LICEN[CS]E*")):
        return f"licence in {folder / texts[0]}"
    card = folder / "README.md"
    named = _LICENCE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return f"licence {named.group(1)} by its card" if named else "no licence is named there: look where it came from"
