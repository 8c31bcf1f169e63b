"""Files of a Hugging Face folder that hold chat templates, and the special tokens that templates name."""

import json
import pathlib
from typing import Any, cast

import msgspec

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FOLDER = "additional_chat_templates"
"""Holds templates by name, NAME.jinja."""
_FLAT = "chat_template."
"""Before the name of such a template where a model's files are sent without folders: chat_template.NAME.jinja."""
_JSON = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
"""Files with a field `chat_template`; the first that has one counts."""


def named_template_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns a folder's files of named templates, by the plain file names under which they can be sent."""
    return {f"{_FLAT}{file.name}": file for file in sorted((folder / FOLDER).glob("*.jinja"))}


def read_templates(folder: pathlib.Path) -> dict[str, str]:
    """Returns the Jinja of a folder's templates by name; `default` is the one without a name.

    chat_template.jinja counts before the fields of JSON files, as in transformers, unless it is empty.

    Raises:
      ValueError: a file is damaged.
    """
    found: dict[str, str] = {}
    for name in _JSON:
        given = read_json(folder / name).get("chat_template")
        if given and not found:
            found = _by_name(given, folder / name)
    named = {file.name: file for file in sorted(folder.glob(f"{_FLAT}*.jinja"))} | named_template_files(folder)
    files = {name.removeprefix(_FLAT).removesuffix(".jinja"): file for name, file in named.items()}
    files["default"] = folder / "chat_template.jinja"
    read = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    texts = {name: text for name, text in read.items() if text.strip()}
    return texts or {name: text for name, text in found.items() if text.strip()}


def read_special_tokens(folder: pathlib.Path) -> dict[str, str]:
    """Returns the texts of a tokenizer's named tokens, such as bos_token.

    Raises:
      ValueError: a file is damaged.
    """
    older, newer = (read_json(folder / f"{name}.json") for name in ("special_tokens_map", "tokenizer_config"))
    found = {name: _token_text(newer.get(name, older.get(name))) for name in _SPECIAL}
    of_model = newer.get("extra_special_tokens")
    if isinstance(of_model, dict):
        found |= {name: _token_text(token) for name, token in cast(dict[str, Any], of_model).items()}
    return {name: text for name, text in found.items() if text is not None}


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty where there is no file.

    Raises:
      ValueError: it holds no JSON object.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{file} must be a JSON object, got {type(found).__name__}")
    return cast(dict[str, Any], found)


def _by_name(given: Any, file: pathlib.Path) -> dict[str, str]:
    """Templates by name, of a text, of an object of texts, or of a list of {name, template}."""
    try:
        if isinstance(given, list):
            given = {one["name"]: one["template"] for one in cast(list[Any], given)}
        return msgspec.convert({"default": given} if isinstance(given, str) else given, dict[str, str])
    except (TypeError, KeyError, msgspec.ValidationError) as e:
        raise ValueError(f"{file}: chat_template must be a text or a list of {{name, template}}") from e


def _token_text(token: Any) -> str | None:
    text = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
