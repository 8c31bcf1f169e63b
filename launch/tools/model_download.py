"""A model lands in a folder whole or not at all: from the Hub, or from whatever fills the folder."""

import fcntl
import glob
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable

from bridge.files import replace_file
from launch.startup.preflight import missing_weights
from launch.tools import smollm2
from learner.data.tokenizer import load_tokenizer
from learner.model.architecture import Architecture

RECORD = "sluice_source.json"
"""In a folder that this command made: what made it. Written last of all that is in it."""


PATTERNS = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    "model.safetensors.index.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "additional_chat_templates/*.jinja"),
    *("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model"),
    *("LICENSE*", "LICENCE*", "README.md", "NOTICE*"),
)
"""Files of the Hub that are a model, its tokenizer and its licence; other formats of the weights are left."""


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


_LICENCE = re.compile(r"^licen[cs]e:[ \t]*(\S.*)$", re.MULTILINE)


def is_hub_name(name: str) -> bool:
    """Returns True for owner/model."""
    return _HUB_NAME.fullmatch(name) is not None


def get(out: pathlib.Path, identity: dict[str, str], fill: Callable[[pathlib.Path], None]) -> bool:
    """Makes a model's folder unless it is there; returns True if it was made now.

    It is filled beside its place, checked, and moved there in one step. A second process waits for the first.

    Args:
      out: the folder.
      identity: what makes it this model and no other; JSON.
      fill: makes the model in a folder, which may hold what an earlier try left.

    Raises:
      ValueError: the place can't be written in or holds something else, or the model can't be had or can't be trained.
    """
    place = pathlib.Path(os.path.abspath(out))  # `.` and `..` have a name then
    record = json.dumps(identity, indent=1, sort_keys=True).encode() + b"\n"
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is a file; give another --out")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = open(place.with_name(f".{place.name}.lock"), "w")  # noqa: SIM115
    except OSError as e:
        raise ValueError(f"nothing can be written in {place.parent}: {e.strerror}; give another --out") from e
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / RECORD).is_file() and identity.items() <= json.loads((place / RECORD).read_text()).items():
            check_trainable(place)
            return False
        if place.is_dir() and any(place.iterdir()):
            raise ValueError(f"{place} is not empty, and holds something else; remove it, or give another --out")
        print(f"{out}: from {', '.join(value for value in identity.values() if value)}", flush=True)
        # An interrupted download of the same model continues in it.
        part = place.with_name(f".{place.name}.{hashlib.sha256(record).hexdigest()[:12]}.part")
        part.mkdir(exist_ok=True)
        fill(part)
        check_trainable(part)
        replace_file(part / RECORD, record, is_durable=True)
        os.replace(part, place)
        for left in place.parent.glob(f".{glob.escape(place.name)}.{'[0-9a-f]' * 12}.part"):
            shutil.rmtree(left, ignore_errors=True)
        return True


def check_trainable(folder: pathlib.Path) -> None:
    """Checks a model's folder: a family that the learner computes, all weights, a tokenizer that fits.

    Raises:
      ValueError: one line that says what is missing, or names what the learner doesn't compute.
    """
    model = _architecture(folder)
    if missing := missing_weights(folder):
        raise ValueError(f"{folder} has no weights: {missing}")
    load_tokenizer(folder, vocab_size=model.vocab_size)


def _architecture(folder: pathlib.Path) -> Architecture:
    try:
        return Architecture.from_hf(folder)
    except FileNotFoundError as e:
        raise ValueError(str(e)) from e


def licence_of(folder: pathlib.Path) -> str:
    """Returns what the folder's own files say of its licence."""
    card = folder / "README.md"
    named = _LICENCE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    if named:
        return f"licence {named.group(1)} by its card"
    if texts := sorted(p.name for p in folder.glob("LICEN[CS]E*")):
        return f"licence in {folder / texts[0]}"
    return "no licence is named there: look where it came from"


def from_hub(name: str, revision: str, folder: pathlib.Path) -> None:
    """Downloads a model; the library continues its own download and checks hashes. An empty revision is the newest.

    The config comes first: weights that can't be trained are not fetched.

    Raises:
      ValueError: it can't be had, or can't be trained.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    for patterns in (["config.json"], list(PATTERNS)):
        try:
            huggingface_hub.snapshot_download(
                name, revision=revision or None, local_dir=folder, allow_patterns=patterns
            )
        except (HfHubHTTPError, OSError, ValueError, RuntimeError) as e:  # of what the library and its client raise
            said = " ".join(str(e).split())[:300]
            raise ValueError(
                f"{name} can't be had from the Hugging Face Hub ({type(e).__name__}: {said}); without a network take "
                f"{smollm2.NAME}, or give a folder of this machine as model.path"
            ) from e
        _architecture(folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes of the download
