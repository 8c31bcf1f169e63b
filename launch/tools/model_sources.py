"""Sources of models: a folder, the Hub, a wheel; and how a model lands in its folder."""

import contextlib
import dataclasses
import fcntl
import functools
import glob
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from bridge.files import replace_file
from launch.startup.preflight import missing_weights
from learner.data.tokenizer import load_tokenizer
from learner.model.architecture import Architecture

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


RECORD = "sluice_source.json"
"""In a folder that this command made: what made it. Written last of all that is in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from."""

    short_name: str
    """For a folder."""
    description: str
    """For the terminal."""
    identity: dict[str, Any]
    """What makes it this model and no other; JSON."""
    fill: Callable[[pathlib.Path], None]
    """Makes the model in a folder, which may hold what an earlier try left; raises ValueError if it can't be had."""
    licence: str = ""
    """Empty: as the folder's own files say."""


def get(out: pathlib.Path, source: ModelSource) -> bool:
    """Makes a source's folder unless it is there; returns True if it was made now.

    It is filled beside its place, checked, and moved there in one step. A second process waits for the first.

    Raises:
      ValueError: the place can't be written in or holds something else, this runs in it, or the model can't be had or
        can't be trained.
    """
    place = pathlib.Path(os.path.abspath(out))  # of `.` and `..` too the name is known then
    if not place.name:
        raise ValueError(f"{out} can't be a model's folder; give another --out")
    with _alone(place):
        if _is_landed(place, source):
            return False
        if place.is_dir() and any(place.iterdir()):
            raise ValueError(
                f"{place} is not empty, and holds something else than {source.description}; remove it, or give "
                "another --out"
            )
        if place.is_dir() and pathlib.Path.cwd().is_relative_to(place.resolve()):
            raise ValueError(
                f"{place} is the folder that this runs in, in whose place the model's would come; give a folder "
                "below it, as in --out=model"
            )
        print(f"{out}: from {source.description}", flush=True)
        record = json.dumps(source.identity, indent=1, sort_keys=True).encode() + b"\n"
        # An interrupted download of the same source continues in it.
        part = place.with_name(f".{place.name}.{hashlib.sha256(record).hexdigest()[:12]}.part")
        part.mkdir(exist_ok=True)
        source.fill(part)
        check_trainable(part)
        replace_file(part / RECORD, record, is_durable=True)
        os.replace(part, place)
        for left in place.parent.glob(f".{glob.escape(place.name)}.{'[0-9a-f]' * 12}.part"):
            shutil.rmtree(left, ignore_errors=True)
        return True


@contextlib.contextmanager
def _alone(place: pathlib.Path) -> Iterator[None]:
    """Held by the one process that makes a folder."""
    if place.exists() and not place.is_dir():
        raise ValueError(f"{place} is a file; give another --out")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(place.with_name(f".{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise ValueError(f"nothing can be written in {place.parent}: {e.strerror}; give another --out") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_landed(place: pathlib.Path, source: ModelSource) -> bool:
    """Returns True if the place holds this source's model; raises ValueError if files of it are missing."""
    record = place / RECORD
    # A folder of an earlier version has more in its record.
    if not record.is_file() or not source.identity.items() <= json.loads(record.read_text()).items():
        return False
    check_trainable(place)
    return True


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(name: str) -> bool:
    """Whether it is written like one: owner/model."""
    return _NAME.fullmatch(name) is not None


def from_hub(name: str, *, revision: str = "") -> ModelSource:
    """Returns the model of that name; an empty revision is the newest."""
    return ModelSource(
        short_name=name.partition("/")[2],
        description=f"{name}{f' at {revision}' if revision else ''} of the Hugging Face Hub",
        identity={"hub": name, "revision": revision},
        fill=functools.partial(_fill, name, revision),
    )


def _fill(name: str, revision: str, folder: pathlib.Path) -> None:
    """Downloads the files that belong to a model; the library continues its own download and checks hashes.

    The config comes first: weights that can't be trained are not fetched.
    """
    _download(name, revision, folder, ["config.json"])
    check_computed(folder)
    _download(name, revision, folder, list(PATTERNS))
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes of the download


def _download(name: str, revision: str, folder: pathlib.Path, patterns: list[str]) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.snapshot_download(name, revision=revision or None, local_dir=folder, allow_patterns=patterns)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as e:  # of what the library and its HTTP client raise
        said = " ".join(str(e).split())[:300]
        raise ValueError(
            f"{name} can't be had from the Hugging Face Hub ({type(e).__name__}: {said}); without a network take "
            "smollm2, or give a folder of this machine as model.path"
        ) from e
