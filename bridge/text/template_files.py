"""Chat template files of a Hugging Face folder, and the Jinja environment that renders them.

The environment has the filters, functions and tags of transformers. `strftime_now` is a variable of each rendering,
because the date is the run's.
"""

import functools
import json
import pathlib
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FOLDER = "additional_chat_templates"
"""Folder of named templates, NAME.jinja."""
_FLAT = "chat_template."
"""Prefix of a named template's file when a model's files are sent without folders: chat_template.NAME.jinja."""
_JSON = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
"""JSON files with a field `chat_template`; the first file that has the field counts."""


def named_template_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns a folder's named template files by the flat file names under which they can be sent."""
    return {f"{_FLAT}{file.name}": file for file in sorted((folder / FOLDER).glob("*.jinja"))}


def read_templates(folder: pathlib.Path) -> dict[str, str]:
    """Returns the Jinja sources of a folder's templates by name; `default` is the template without a name.

    chat_template.jinja takes precedence over fields of JSON files, as in transformers, unless it is empty. Raises
    ValueError if a file is corrupt.
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
    """Returns the texts of a tokenizer's named tokens, such as bos_token. Raises ValueError if a file is corrupt."""
    older, newer = (read_json(folder / f"{name}.json") for name in ("special_tokens_map", "tokenizer_config"))
    found = {name: _token_text(newer.get(name, older.get(name))) for name in _SPECIAL}
    of_model = newer.get("extra_special_tokens")
    if isinstance(of_model, dict):
        found |= {name: _token_text(token) for name, token in cast(dict[str, Any], of_model).items()}
    return {name: text for name, text in found.items() if text is not None}


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} without the file; raises ValueError if it cannot be read as an object."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"{file} cannot be read as JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{file} must be a JSON object, got {type(found).__name__}")
    return cast(dict[str, Any], found)


def _by_name(given: Any, file: pathlib.Path) -> dict[str, str]:
    """Returns templates by name from a text, an object of texts, or a list of {name, template}."""
    try:
        if isinstance(given, list):
            given = {one["name"]: one["template"] for one in cast(list[Any], given)}
        return msgspec.convert({"default": given} if isinstance(given, str) else given, dict[str, str])
    except (TypeError, KeyError, msgspec.ValidationError) as e:
        raise ValueError(f"{file}: chat_template must be a text or a list of {{name, template}}") from e


def _token_text(token: Any) -> str | None:
    text = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}...{% endgeneration %}`, which marks trainable text. Here it renders only its text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parses the tag's body as its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.cache
def compiled(source: str) -> jinja2.Template:
    """Returns the compiled template, or raises TemplateSyntaxError, in an environment like that of transformers."""
    return _environment().from_string(source)


@functools.cache
def variables(source: str) -> frozenset[str]:
    """Returns the names that a template reads from outside: its arguments."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


@functools.cache
def names(source: str) -> frozenset[str]:
    """Returns all field names and string constants of a template; it never reads a message field with another name."""
    tree = _environment().parse(source)
    fields = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    return frozenset(fields | {c.value for c in tree.find_all(jinja2.nodes.Const) if isinstance(c.value, str)})


@functools.cache
def _environment() -> jinja2.Environment:
    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson  # pyright: ignore[reportUnknownMemberType]
    env.globals["raise_exception"] = raise_exception  # pyright: ignore[reportUnknownMemberType]
    return env
