"""Presets, config files and typed command-line overrides: `--config=NAME --config.section.field=value`.

msgspec converts each value to the declared type of its field. Invalid values raise ValueError before any process
starts.
"""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import pathlib
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from configs import custom_functions, suggestions, toml_config
from configs.schema import Config
from configs.sections.loss_table import LOSS_CONSTANTS
from configs.sections.rewards import JudgeEngine


def split_argv(argv: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Returns the arguments that are not overrides, the overrides by dotted path, and the paths given repeatedly.

    The last value of a repeated path applies. Raises ValueError if an override has no value.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    repeated: list[str] = []
    for arg in argv:
        body = arg.lstrip("-")
        if not (arg.startswith("-") and body.startswith("config.")):
            rest.append(arg)
            continue
        path, sep, value = body.removeprefix("config.").partition("=")
        if not sep:
            raise ValueError(f"{arg}: expected a value. Use --config.{path}=VALUE")
        if path in overrides:
            repeated.append(path)
        overrides[path] = value
    return rest, overrides, list(dict.fromkeys(repeated))


def load_preset(preset: str) -> Config:
    """Returns the config of a preset, a recipe or a file.

    `NAME:ARGUMENT` passes a size, model or schedule to the preset. `FILE.py:ARGUMENT` passes it to the file's
    `get_config()`. `FILE.json` has the format of `to_json`, and `FILE.toml` that of `toml_config`; `FILE.toml:PRESET`
    replaces the file's preset.

    Raises ValueError if the preset or file does not exist (the error names similar presets, or all of them), has no
    `get_config`, fails, or returns no Config.
    """
    return _load(preset, ())


def _load(preset: str, opened: tuple[pathlib.Path, ...]) -> Config:
    """Returns the config of a preset; `opened` are TOML files whose presets lead to it."""
    name, _, argument = preset.partition(":")
    if (shipped := _shipped(name)) is not None:
        try:
            return shipped(*([argument] if argument else []))
        except (ValueError, TypeError) as e:  # an unexpected argument
            raise ValueError(f"{preset}: {e}") from e
    file = pathlib.Path(name).expanduser()
    if not file.is_file():
        raise ValueError(f"--config: no preset, recipe or file {name!r}; {_instead_of(name)}")
    if file.suffix == ".json":
        if argument:
            raise ValueError(f"--config={preset}: a JSON file is a complete config and takes no argument {argument!r}")
        return _load_json(file)
    if file.suffix == ".toml":
        return _load_toml(file, argument, opened)
    with custom_functions.importable(file.resolve().parent):
        try:
            module = _import_file(file)
        except (Exception, SystemExit) as e:  # user code can raise anything
            raise ValueError(_failure(file, e)) from e
        if not callable(getattr(module, "get_config", None)):
            raise ValueError(f"{name}: expected a function get_config(), got none; {_presets()}")
        try:
            config = module.get_config(*([argument] if argument else []))
        except (ValueError, TypeError) as e:  # an unexpected argument or an invalid value
            raise ValueError(f"{preset}: {e}") from e
        except (Exception, SystemExit) as e:
            raise ValueError(_failure(file, e)) from e
    if not isinstance(config, Config):
        raise ValueError(f"{preset}: get_config() must return a configs.schema.Config, got {type(config)}")
    return config


def recipe_names() -> list[str]:
    """Returns the names of all recipes, the modules of `configs.recipes`."""
    folder = pathlib.Path(__file__).parent / "recipes"
    return sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")


def preset_names() -> list[str]:
    """Returns the names of all presets, sorted."""
    return sorted(importlib.import_module("configs.presets").NAMES)


def _shipped(name: str) -> Callable[..., Config] | None:
    if name in recipe_names():
        return importlib.import_module(f"configs.recipes.{name}").get_config
    return importlib.import_module("configs.presets").NAMES.get(name)


def _import_file(file: pathlib.Path) -> types.ModuleType:
    """Imports a file as a module. Dataclasses with string annotations require it in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(f"sluice_preset_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError("expected a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _load_json(file: pathlib.Path) -> Config:
    try:
        raw = json.loads(file.read_text())
        if not isinstance(raw, dict):
            raise ValueError(f"expected a JSON object, got {type(raw).__name__}")
        return from_dict(cast(dict[str, Any], raw))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file}: {e}") from e


def _load_toml(file: pathlib.Path, preset: str, opened: tuple[pathlib.Path, ...]) -> Config:
    """Returns the config of a TOML file on top of `preset`, or of the file's own preset if `preset` is empty."""
    own, tables = toml_config.read(file)
    chain = (*opened, file.resolve())
    if chain[-1] in opened:
        raise ValueError(f"{' -> '.join(map(str, chain))}: the preset of {file} leads back to it")
    name = preset or own
    base = _load(name, chain) if name else Config(preset=file.stem)
    try:
        return from_dict(toml_config.merged(dataclasses.asdict(base), _with_none(tables)))
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def _with_none(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns TOML tables with None for "none" where the field accepts None."""

    def read(path: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _with_none(cast(Mapping[str, Any], value), f"{path}.")
        if value == toml_config.NONE and type(None) in typing.get_args(_field_type(path)):
            return None
        return value

    return {name: read(prefix + name, value) for name, value in tables.items()}


def _instead_of(name: str) -> str:
    """Returns a suggestion for a preset that does not exist."""
    if near := suggestions.nearest(name, [*preset_names(), *recipe_names()], cutoff=0.7):
        return f"did you mean {' or '.join(near)}?"
    if losses := suggestions.nearest(name, list(LOSS_CONSTANTS)):
        return f"it is a loss: choose a schedule, for example --config=rolloutpipe --config.loss.name={losses[0]}"
    return _presets()


def _presets() -> str:
    return f"presets are {', '.join([*preset_names(), *recipe_names()])}"


def _failure(file: pathlib.Path, error: BaseException) -> str:
    """Returns the failing line of a preset and the error; for an import error also the search path."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    place = f"{file}:{lines[-1]}" if lines and lines[-1] else str(file)
    where = ""
    if isinstance(error, ImportError):
        where = f" (looked in {file.resolve().parent}, on PYTHONPATH and among the installed packages)"
    return f"{place}: {type(error).__name__}: {error}{where}"


def apply(config: Config, overrides: Mapping[str, str]) -> Config:
    """Returns the config with fields replaced by dotted path, validated as a whole.

    Raises ValueError if a field is unknown (the error names the nearest valid one) or a value is invalid.
    """
    return from_dict(merge(dataclasses.asdict(config), overrides))


def merge(raw: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Returns plain data with fields replaced by dotted path. Only `from_dict` checks combinations of fields.

    Raises ValueError if a field is unknown (the error names the nearest valid one) or a value has the wrong type.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(raw))
    for path, text in overrides.items():
        put(merged, path, _parse(path, text, _field_type(path)))
    return merged


def put(raw: dict[str, Any], path: str, value: Any) -> None:
    """Replaces a field of plain config data by its dotted path. Raises ValueError if the field is unknown."""
    *parents, leaf = _resolve(path)[0]
    for part in parents:
        raw = raw.setdefault(part, {})  # a new entry of a dict field
    raw[leaf] = value


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Returns a `Config` from plain data. Raises ValueError for an unknown field or an invalid value."""
    for path in _leaves(raw):
        _field_type(path)
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise ValueError(_with_field_first(str(e))) from e


def _with_field_first(error: str) -> str:
    """Returns msgspec's error without " - at `$.SECTION`", which repeats the field named at its start."""
    text, _, place = error.partition(" - at `$.")
    section = place.rstrip("`")
    return text if section and text.startswith(section) else f"config: {error}".replace("`$.", "`config.")


def to_json(config: Config) -> str:
    """Returns the config as indented JSON; `from_dict(json.loads(...))` reads it."""
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def _field_type(path: str) -> Any:
    """Returns the declared type of a dotted path. A dict field accepts any key below it."""
    return _resolve(path)[1]


def _resolve(path: str) -> tuple[list[str], Any]:
    """Returns the names on a dotted path, and the declared type at its end."""
    node: Any = Config
    seen: list[str] = []
    parts = path.split(".")
    for index, part in enumerate(parts):
        if typing.get_origin(node) is dict:
            node = typing.get_args(node)[1]
            if not dataclasses.is_dataclass(node):
                return [*seen, ".".join(parts[index:])], node  # a key may contain dots
            seen.append(part)
            continue
        if not dataclasses.is_dataclass(node):
            raise ValueError(f"config.{'.'.join(seen)}: expected no subfield, got {part!r}")
        hints = typing.get_type_hints(node)
        if part not in hints:
            if seen == ["judge"] and part in typing.get_type_hints(JudgeEngine):
                raise ValueError(f"config has no field {path!r}; did you mean 'judge.engine.{part}'?")
            instead = suggestions.unknown_field(path, part, seen, list(hints), field_paths())
            raise ValueError(f"config has no field {path!r}; {instead}")
        node = hints[part]
        seen.append(part)
    return seen, node


@functools.cache
def field_paths() -> tuple[str, ...]:
    """Returns the dotted paths of all config fields."""
    return tuple(_paths(Config, ""))


def field_named(name: str) -> str | None:
    """Returns the field that a name means, with or without a section, ours or another project's; None if unclear."""
    return name if name in field_paths() else suggestions.field_of(name.rpartition(".")[2], field_paths())


def _paths(node: Any, prefix: str) -> list[str]:
    paths: list[str] = []
    for name, kind in typing.get_type_hints(node).items():
        paths += _paths(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
    return paths


def _parse(path: str, text: str, kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        raise ValueError(f"config.{path}: expected a field, got a section. Use --config.{path}.FIELD=VALUE")
    if typing.get_origin(kind) is dict:
        try:
            # Decode sections as plain data, because msgspec would drop unknown fields without an error.
            is_plain = not dataclasses.is_dataclass(typing.get_args(kind)[1])
            return msgspec.json.decode(text, type=kind if is_plain else dict[str, dict[str, Any]])
        except msgspec.DecodeError as e:
            raise ValueError(f"--config.{path}: expected a JSON object, got {text!r} ({e})") from e
    if text.lower() in ("none", "null") and type(None) in typing.get_args(kind):
        return None
    if {int, str} <= set(typing.get_args(kind)):  # a task argument: text that parses as JSON is not a string
        if text.lower() in ("true", "false") and bool in typing.get_args(kind):
            return text.lower() == "true"
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError:
            return text
    try:
        # strict=False reads numbers and booleans from text, but rejects "1.5" as an int and "2" as a bool.
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as e:
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        wanted = f"one of {', '.join(map(str, choices))}" if choices else type_name(kind)
        hint = suggestions.hint(text, [str(choice) for choice in choices])
        raise ValueError(f"--config.{path}: expected {wanted}, got {text!r}{hint}") from e


def type_name(kind: Any) -> str:
    """Returns the name of a declared type, for example "int | None" or "on|off"."""
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is dict:
        return "JSON"
    parts = typing.get_args(kind)
    return " | ".join(map(type_name, parts)) if parts else "None" if kind is type(None) else kind.__name__


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, value in raw.items():
        path = prefix + name
        section: Mapping[str, Any] = cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
        paths += _leaves(section, path + ".") if section else [path]
    return paths
