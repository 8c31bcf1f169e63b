"""Presets and typed command-line overrides: `--config=FILE --config.section.field=value`.

msgspec converts each value to the declared type of its field. Invalid values raise ValueError before any process
starts.
"""

import copy
import dataclasses
import difflib
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

from configs import custom_functions
from configs.schema import Config

_OTHER_NAMES = {
    "optimizer.learning_rate": "lr",
    "optimizer.warmup_steps": "num_warmup_steps warmup",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "wd",
    "optimizer.max_grad_norm": "grad_clip clip_grad",
    "rounds.samples_per_group": "n k num_generations group_size num_samples",
    "rounds.groups_per_update": "batch_size train_batch_size mini_batch_size",
    "rounds.epochs": "num_iterations ppo_epochs",
    "sampling.max_response_tokens": "max_tokens max_new_tokens max_completion_length max_response_length",
    "model.max_tokens": "max_prompt_length max_model_len max_length",
    "loss.kl_coef": "beta kl_beta kl_loss_coef",
    "loss.clip_low": "epsilon clip_range clip_ratio",
    "loss.clip_high": "epsilon_high",
    "loss.entropy_coef": "entropy_coeff",
    "loss.advantage": "adv_estimator",
    "run.num_updates": "max_steps num_steps total_training_steps",
    "run.dir": "output_dir",
    "run.trackers": "report_to logger",
    "run.project": "project_name",
    "model.path": "model_name_or_path model_name",
    "prompts.path": "dataset data train_files",
    "prompts.verifier": "reward reward_fn",
    "checkpoint.every_n_steps": "save_steps save_freq",
    "evaluation.every_n_steps": "eval_steps test_freq",
    "actor.tensor_parallel_size": "tp",
    "lora.rank": "r",
    "lora.targets": "target_modules",
}
"""Names of config fields in other projects, by our name."""
OTHER_NAMES = {other: ours for ours, others in _OTHER_NAMES.items() for other in others.split()}
"""Our field path by the name in other projects (without its section)."""


def split_argv(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments that are not overrides, and the overrides by dotted path.

    Raises:
      ValueError: an override has no value or occurs twice.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    for arg in argv:
        body = arg.lstrip("-")
        if not (arg.startswith("-") and body.startswith("config.")):
            rest.append(arg)
            continue
        path, sep, value = body.removeprefix("config.").partition("=")
        if not sep:
            raise ValueError(f"{arg}: expected a value. Use --config.{path}=VALUE")
        if path in overrides:
            raise ValueError(f"--config.{path} is given twice")
        overrides[path] = value
    return rest, overrides


def load_preset(preset: str) -> Config:
    """Returns the config of a preset, a recipe or a file.

    `NAME:ARGUMENT` passes a size, model or schedule to the preset. `FILE.py:ARGUMENT` passes it to the file's
    `get_config()`. `FILE.json` has the format of `to_json`.

    Raises:
      ValueError: the preset or file does not exist (the error lists the presets), has no `get_config`, fails, or
        returns no
        Config.
    """
    name, _, argument = preset.partition(":")
    if (shipped := _shipped(name)) is not None:
        try:
            return shipped(*([argument] if argument else []))
        except (ValueError, TypeError) as e:  # an unexpected argument
            raise ValueError(f"{preset}: {e}") from e
    file = pathlib.Path(name).expanduser()
    if not file.is_file():
        raise ValueError(f"no config file {name!r}, and no preset of this name; {_presets()}")
    if file.suffix == ".json":
        return _load_json(file)
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

    Raises:
      ValueError: a field is unknown (the error names the nearest valid one) or a value is invalid.
    """
    return from_dict(merge(dataclasses.asdict(config), overrides))


def merge(raw: Mapping[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Returns plain data with fields replaced by dotted path. Only `from_dict` checks combinations of fields.

    Raises:
      ValueError: a field is unknown (the error names the nearest valid one) or a value has the wrong type.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(raw))
    for path, text in overrides.items():
        kind = _field_type(path)
        parents, _, leaf = path.rpartition(".")
        node = merged
        for part in parents.split(".") if parents else ():
            node = node.setdefault(part, {})  # a new entry of a dict field
        node[leaf] = _parse(path, text, kind)
    return merged


def from_dict(raw: Mapping[str, Any]) -> Config:
    """Returns a `Config` from plain data. Raises ValueError for an unknown field or an invalid value."""
    for path in _leaves(raw):
        _field_type(path)
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise ValueError(f"config: {e}".replace("`$.", "`config.")) from e


def to_json(config: Config) -> str:
    """Returns the config as indented JSON; `from_dict(json.loads(...))` reads it."""
    return json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n"


def _field_type(path: str) -> Any:
    """Returns the declared type of a dotted path. A dict field accepts any key below it."""
    node: Any = Config
    seen: list[str] = []
    for part in path.split("."):
        if typing.get_origin(node) is dict:
            node = typing.get_args(node)[1]
            seen.append(part)
            if not dataclasses.is_dataclass(node):
                return node  # a key may contain dots
            continue
        if not dataclasses.is_dataclass(node):
            raise ValueError(f"config.{'.'.join(seen)}: expected no subfield, got {part!r}")
        hints = typing.get_type_hints(node)
        if part not in hints:
            raise ValueError(f"config has no field {path!r}; {_instead(path, part, seen, list(hints))}")
        node = hints[part]
        seen.append(part)
    return node


def _instead(path: str, part: str, section: list[str], names: list[str]) -> str:
    """Returns a suggestion for an unknown field: its name in other projects, similar spellings, or all fields.

    `part` is the first part of `path` that does not exist, `section` the parts before it, and `names` the existing
    names.
    """
    leaf, rest = path.rpartition(".")[2], path.split(".")[len(section) + 1 :]
    leaves = {other.rpartition(".")[2]: other for other in _all_paths()}
    near = difflib.get_close_matches(part, names, n=1, cutoff=0.6 if len(part) < 4 else 0.7)
    here = ".".join([*section, near[0], *rest]) if near else ""
    here = (difflib.get_close_matches(here, _all_paths(), n=1, cutoff=0.8) or [here])[0] if rest else here
    if leaf == part and leaf in OTHER_NAMES:
        here = OTHER_NAMES[leaf]
    elif leaf in leaves and here not in leaves.values():
        here = leaves[leaf]
    elif not near and (elsewhere := difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.85)):
        here = leaves[elsewhere[0]]
    return f"did you mean {here!r}?" if here else f"{'.'.join(section) or 'config'} has {', '.join(names)}"


def _all_paths(node: Any = Config, prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, kind in typing.get_type_hints(node).items():
        paths += _all_paths(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
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
        raise ValueError(f"--config.{path}: expected {wanted}, got {text!r}") from e


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
