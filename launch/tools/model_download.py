"""Model download into a folder, atomically: from the Hub or from a given function."""

import fcntl
import functools
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
from launch.terminal import WaitMessages
from launch.tools import smollm2
from learner.data.tokenizer import load_tokenizer
from learner.model.architecture import Architecture

RECORD = "sluice_source.json"
"""Record of a download's source, the last file written into a model folder."""


PATTERNS = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    "model.safetensors.index.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "additional_chat_templates/*.jinja"),
    *("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model"),
    *("LICENSE*", "LICENCE*", "README.md", "NOTICE*"),
)
"""Hub files of a model, its tokenizer and its license; weights in other formats are skipped."""


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


_LICENCE = re.compile(r"^licen[cs]e:[ \t]*(\S.*)$", re.MULTILINE)


def is_hub_name(name: str) -> bool:
    """Returns True for names of the form owner/model."""
    return _HUB_NAME.fullmatch(name) is not None


def get(out: pathlib.Path, identity: dict[str, str], fill: Callable[[pathlib.Path], None]) -> bool:
    """Makes a model folder unless it exists; returns True if it was made now.

    The model is written to a sibling folder, checked, and renamed. Concurrent processes wait for the first one. `fill`
    writes into a folder that may contain files of an interrupted attempt. Raises ValueError if the folder is not
    writable or contains something else, or the model is unavailable or not trainable; FileNotFoundError if it has no
    config.json.
    """
    place = pathlib.Path(os.path.abspath(out))  # resolves `.` and `..`
    record = json.dumps(identity, indent=1, sort_keys=True).encode() + b"\n"
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place}: expected a folder, got a file; set another --out")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = open(place.with_name(f".{place.name}.lock"), "w")  # noqa: SIM115
    except OSError as e:
        raise ValueError(f"{place.parent} is not writable: {e.strerror}; set another --out") from e
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (place / RECORD).is_file() and identity.items() <= json.loads((place / RECORD).read_text()).items():
            check_trainable(place)
            return False
        if place.is_dir() and any(place.iterdir()):
            raise ValueError(f"{place}: expected an empty folder or this model, got other files; set another --out")
        print(f"{out}: from {', '.join(value for value in identity.values() if value)}", flush=True)
        # An interrupted download of the same model continues in this folder.
        part = place.with_name(f".{place.name}.{hashlib.sha256(record).hexdigest()[:12]}.part")
        part.mkdir(exist_ok=True)
        with WaitMessages(functools.partial(print, flush=True), f"{out}: downloading"):
            fill(part)
        check_trainable(part)
        replace_file(part / RECORD, record, is_durable=True)
        os.replace(part, place)
        for left in place.parent.glob(f".{glob.escape(place.name)}.{'[0-9a-f]' * 12}.part"):
            shutil.rmtree(left, ignore_errors=True)
        return True


def check_trainable(folder: pathlib.Path) -> None:
    """Raises ValueError unless a folder has a supported architecture, all weights, and a matching tokenizer.

    Raises FileNotFoundError if it has no config.json.
    """
    model = Architecture.from_hf(folder)
    if missing := missing_weights(folder):
        raise ValueError(f"{folder}: missing weights: {missing}")
    load_tokenizer(folder, vocab_size=model.vocab_size)


def licence_of(folder: pathlib.Path) -> str:
    """Describes the license according to the folder's files."""
    card = folder / "README.md"
    named = _LICENCE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    if named:
        return f"license {named.group(1)} (model card)"
    if texts := sorted(p.name for p in folder.glob("LICEN[CS]E*")):
        return f"license in {folder / texts[0]}"
    return "license not stated; check the source of the model"


def from_hub(name: str, revision: str, folder: pathlib.Path) -> None:
    """Downloads a model from the Hub; the library resumes downloads and checks hashes. Empty revision: the newest.

    The config is downloaded first, so weights of an unsupported model are never fetched. Raises ValueError if the model
    is unavailable or not trainable, and FileNotFoundError if it has no config.json.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    for patterns in (["config.json"], list(PATTERNS)):
        try:
            huggingface_hub.snapshot_download(
                name, revision=revision or None, local_dir=folder, allow_patterns=patterns
            )
        # the errors of the library and its HTTP client
        except (HfHubHTTPError, OSError, ValueError, RuntimeError) as e:
            said = " ".join(str(e).split())[:300]
            raise ValueError(
                f"{name} cannot be downloaded from the Hugging Face Hub ({type(e).__name__}: {said}); without a "
                f"network use {smollm2.NAME}, or set model.path to a folder on this machine"
            ) from e
        Architecture.from_hf(folder)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's download metadata
