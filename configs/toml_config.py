"""TOML form of a config: `preset = "NAME:size"` and one table per section.

    preset = "rolloutpipe:tiny"
    [optimizer]
    learning_rate = 3e-4

A file sets only the fields that differ from its preset. `render` writes all fields, and marks those that differ from
the default of their section.
"""

import dataclasses
import json
import pathlib
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from typing import Any, cast

from configs.schema import Config

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
NONE = "none"
"""Text for None, which TOML cannot express, in fields that accept None."""


def read(file: pathlib.Path) -> tuple[str | None, dict[str, Any]]:
    """Returns the file's preset (None without one) and its tables.

    Raises ValueError if the file is not valid TOML, or `preset` is not a string.
    """
    try:
        raw = tomllib.loads(file.read_text())
    except ValueError as e:  # invalid TOML or UTF-8
        raise ValueError(f"{file}: {e}") from e
    preset = raw.pop("preset", None)
    if not isinstance(preset, str | None):
        raise ValueError(f"{file}: preset: expected a string, got {preset!r}")
    return preset, raw


def merged(base: Mapping[str, Any], tables: Mapping[str, Any], kind: type = Config) -> dict[str, Any]:
    """Returns plain data of a `kind` with the fields of TOML tables replaced. A table for a dict field replaces it."""
    result, kinds = dict(base), typing.get_type_hints(kind)
    for name, given in tables.items():
        old, inner = base.get(name), kinds.get(name)
        if isinstance(inner, type) and dataclasses.is_dataclass(inner) and isinstance(given, Mapping):
            result[name] = merged(cast(Mapping[str, Any], old), cast(Mapping[str, Any], given), inner)
        else:
            result[name] = given
    return result


def render(config: Config, *, base: str | None = None) -> str:
    """Returns the whole config as TOML. A comment gives the default of each field that differs from it.

    `base` is written as the preset. `overrides.load_preset` reads the text back as the same config; without a preset,
    its label is the file's name.
    """
    lines = [f"preset = {_value(base)}"] if base else []
    defaults = Config(preset="")
    for section in (field.name for field in dataclasses.fields(config) if field.name != "preset"):
        fields = _fields(getattr(config, section), getattr(defaults, section))
        lines += ["", f"[{section}]", *fields]
    return "\n".join(lines) + "\n"


def _fields(section: Any, defaults: Any) -> Iterator[str]:
    for name in (field.name for field in dataclasses.fields(section)):
        value, default = getattr(section, name), getattr(defaults, name)
        yield f"{name} = {_value(value)}" + (f"  # default: {_value(default)}" if value != default else "")


def _value(value: Any) -> str:
    """Returns a value as TOML on one line."""
    if value is None:
        return f'"{NONE}"'
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        items = (f"{_key(key)} = {_value(item)}" for key, item in cast(Mapping[str, Any], value).items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, cast("list[Any]", value))) + "]"
    if isinstance(value, float):
        return repr(value)  # inf and nan, too, have the same spelling
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)
