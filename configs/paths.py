"""Paths in a configuration: `~` and relative ones become absolute on the machine that sets the run up."""

import dataclasses
import functools
import os
import pathlib
import typing
from typing import Annotated, Any, TypeVar

T = TypeVar("T")

_PREFIXES = ("hf:", "file://", "sqlite:///")
"""Prefixes of a local path."""


class _Local:
    """Marks a text field as a path of the machine that sets the run up."""


class _OnActors:
    """Marks a text field as a path that each actor's machine has."""


class _CommandOnActors:
    """Marks a text field as a program that each actor's machine has."""


LocalPath = Annotated[str, _Local()]
"""A path, or a URL with a local path (`file://`, `sqlite:///`), or `hf:` and a folder; empty where there is none."""
ActorPath = Annotated[str, _OnActors()]
"""A path of each actor's machine, whose `~` is the home of the actor's user; empty where there is none."""
ActorCommand = Annotated[str, _CommandOnActors()]
"""A program: a path of each actor's machine, or a name without a slash that is looked for in PATH; empty: none."""


def expand_home(section: object) -> None:
    """Replaces a leading `~` or `~user` in every `LocalPath` of a frozen dataclass that is being made.

    Raises:
      ValueError: no such user has a home folder here.
    """
    for name in _fields(type(section), _Local):
        prefix, path = _split(getattr(section, name))
        if path.startswith("~"):
            found = os.path.expanduser(path)
            if found == path:
                raise ValueError(f"{prefix}{path}: expected a user with a home folder after ~. Give the whole path.")
            object.__setattr__(section, name, prefix + found)


def absolute(config: T, folder: pathlib.Path) -> T:
    """Returns a configuration, or a part of one, whose relative paths are below `folder`, those of actors too.

    The name of a data set of the Hub (`hf:NAME`) stays, and so do URLs of buckets and databases and commands of PATH.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, config)):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = absolute(value, folder)
        elif isinstance(value, dict):
            entries = typing.cast(dict[str, Any], value)
            changes[field.name] = {
                k: absolute(v, folder) if dataclasses.is_dataclass(v) else v for k, v in entries.items()
            }
        elif field.name in _fields(type(config), _CommandOnActors) and os.sep not in value:
            continue
        elif field.name in _fields(type(config), _Local, _OnActors, _CommandOnActors):
            changes[field.name] = _absolute(value, folder)
    return dataclasses.replace(typing.cast(Any, config), **changes)


@functools.cache
def _fields(section: type, *kinds: type) -> tuple[str, ...]:
    hints = typing.get_type_hints(section, include_extras=True)
    return tuple(n for n, hint in hints.items() if any(isinstance(m, kinds) for m in getattr(hint, "__metadata__", ())))


def _split(text: str) -> tuple[str, str]:
    prefix = next((p for p in _PREFIXES if text.startswith(p)), "")
    return prefix, text[len(prefix) :]


def _absolute(text: str, folder: pathlib.Path) -> str:
    prefix, path = _split(text)
    if not path or "://" in path or path.startswith("~") or (prefix == "hf:" and not (folder / path).exists()):
        return text
    return prefix + os.path.normpath(os.path.join(folder, path))
