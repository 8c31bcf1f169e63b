"""Shared parts of config sections: number ranges and path types, declared in annotations.

Creating a section expands `~` in its local paths. Setting up a run makes relative paths absolute on that machine.
"""

import dataclasses
import enum
import functools
import math
import os
import pathlib
import re
import typing
import urllib.parse
from collections.abc import Collection, Iterator
from typing import Annotated, Any, TypeVar

from bridge.rollout_types import MAX_ABS_REWARD, MAX_TEMPERATURE, MIN_TEMPERATURE

T = TypeVar("T")

_LARGEST = 2.0**53
"""Upper bound by default of a range. float64 represents every integer up to it exactly."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Range of finite numbers from `low` to `high`; `excludes_low` makes the lower bound exclusive."""

    low: float
    high: float = _LARGEST
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        """Returns True if the value is a finite number in the range."""
        return math.isfinite(value) and self.low <= value <= self.high and not (self.excludes_low and value == self.low)

    def wanted(self, value: float) -> str:
        """Returns the expected range for an error message. A wide range shows only the violated bound."""
        if not math.isfinite(value):
            return "finite"
        if self.high <= 1e6:
            return f"in {'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"
        return f"<= {self.high:.0f}" if value > self.high else f"{'>' if self.excludes_low else '>='} {self.low:g}"


Count = Annotated[int, Range(0, 2**31 - 1, excludes_low=True)]
CountOrZero = Annotated[int, Range(0, 2**31 - 1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""Seed of all random generators of a run. Grain accepts 32 bits."""
Seconds = Annotated[float, Range(0, 1e9, excludes_low=True)]
"""Positive duration of at most 31 years. Threads and timers overflow slightly above that."""
SecondsOrZero = Annotated[float, Range(0, 1e9)]
Fraction = Annotated[float, Range(0, 1, excludes_low=True)]
FractionOrZero = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, excludes_low=True)]
NotNegative = Annotated[float, Range(0)]
Finite = Annotated[float, Range(-_LARGEST)]
Weight = Annotated[float, Range(1e-6, 1e6)]
"""Sampling weight of a source. The range keeps the ratio of two weights countable in integers."""
Reward = Annotated[float, Range(-MAX_ABS_REWARD, MAX_ABS_REWARD)]

_PREFIXES = ("hf:", "file://", "sqlite:///")
"""Prefixes that can precede a local path."""


class _Path(enum.Enum):
    """Marker of path fields: the machine that holds the path."""

    LOCAL = enum.auto()
    ACTOR = enum.auto()
    ACTOR_TEXT = enum.auto()
    ACTOR_COMMAND = enum.auto()


LocalPath = Annotated[str, _Path.LOCAL]
"""Local path, a URL with a local path (`file://`, `sqlite:///`), or `hf:` and a folder. Empty: no path."""
ActorPath = Annotated[str, _Path.ACTOR]
"""Path on each actor's machine. `~` is the home folder of the actor's user. Empty: no path."""
ActorText = Annotated[str, _Path.ACTOR_TEXT]
"""Text, or `@FILE`: the content of a UTF-8 file on each actor's machine."""
ActorCommand = Annotated[str, _Path.ACTOR_COMMAND]
"""Program on each actor's machine: a path, or a name without a slash that is searched in PATH. Empty: no program."""


class CheckedSection:
    """Base class of config sections: expands `~` in local paths and checks number ranges."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number outside its range, or a `~user` without a home folder."""
        expand_home(self)
        check_ranges(type(self).__name__.removesuffix("Config").lower(), self)


def check_ranges(where: str, section: object) -> None:
    """Raises ValueError if a number of the section at path `where` is outside its annotated `Range`.

    Dict fields are checked per entry; None and non-numbers are skipped.
    """
    for name, found in _ranges(type(section)).items():
        for entry, value in _entries(name, getattr(section, name)):
            if isinstance(value, int | float) and value not in found:
                raise ValueError(f"{where}.{entry} must be {found.wanted(value)}, got {value}")


def check_unread(where: str, section: Any, why: str, names: Collection[str] | None = None) -> None:
    """Raises ValueError, with the reason `why`, if a field (of `names`) has no effect and differs from its default."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name in fields if names is None else names:
        field, value = fields[name], getattr(section, name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value != default:
            raise ValueError(f"{where}.{name}={value} has no effect {why}")


def temperature(section: str, value: float) -> None:
    """Raises ValueError if vLLM would not sample at exactly this temperature."""
    if not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"{section}.temperature must be in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}] (vLLM raises lower values to "
            f"{MIN_TEMPERATURE}, and rejects higher ones), got {value}"
        )


def check_api_url(field: str, url: str, *, hint: str = "") -> urllib.parse.SplitResult:
    """Returns the parts of the base URL of an OpenAI-compatible API.

    Raises ValueError for any other URL; `hint` ends the error for one with a user, password or query.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{field} must be like http://127.0.0.1:8000/v1 or https://host/v1, got {url[:80]!r}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{field} must not contain a user, password or query.{hint}")
    return parts


def check_pattern(where: str, pattern: str, *, needs_group: bool) -> None:
    """Raises ValueError if a field is not a regular expression, or lacks a required group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as e:
        raise ValueError(f"{where}: expected a regular expression, got an error: {e}") from e
    if needs_group and groups < 1:
        raise ValueError(f"{where}: expected a group in parentheses, got {pattern!r}")


def is_core_list(text: str) -> bool:
    """Returns True for a core list such as "0", "0-3" or "0,2-3"."""
    bounds = [part.split("-") for part in text.split(",")]
    return all(len(b) <= 2 and all(n.strip().isdecimal() for n in b) and int(b[0]) <= int(b[-1]) for b in bounds)


@functools.cache
def _ranges(section: type) -> dict[str, Range]:
    hints = typing.get_type_hints(section, include_extras=True)
    return {name: found for name, hint in hints.items() if (found := _range(hint)) is not None}


def _range(hint: Any) -> Range | None:
    own = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Range)]
    return own[0] if own else next(filter(None, map(_range, typing.get_args(hint))), None)


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        entries = typing.cast(dict[str, Any], value)
        yield from ((f"{name}.{key}", number) for key, number in entries.items())
    else:
        yield name, value


def expand_home(section: object) -> None:
    """Expands `~` in each `LocalPath` of a frozen dataclass. Raises ValueError if the user has no home folder."""
    for name in _fields(type(section), _Path.LOCAL):
        prefix, path = _split(getattr(section, name))
        if path.startswith("~"):
            found = os.path.expanduser(path)
            if found == path:
                raise ValueError(f"{prefix}{path}: expected a user with a home folder after ~. Give the whole path.")
            object.__setattr__(section, name, prefix + found)


def absolute(config: T, folder: pathlib.Path) -> T:
    """Returns a config or section whose relative paths are resolved against `folder`, including actor paths.

    Hub dataset names (`hf:NAME`), bucket and database URLs, and commands without a slash stay unchanged.
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
        elif field.name in _fields(type(config), _Path.ACTOR_COMMAND) and os.sep not in value:
            continue
        elif field.name in _fields(type(config), _Path.ACTOR_TEXT):
            changes[field.name] = f"@{_absolute(value[1:], folder)}" if value.startswith("@") else value
        elif field.name in _fields(type(config), *_Path):
            changes[field.name] = _absolute(value, folder)
    return dataclasses.replace(typing.cast(Any, config), **changes)


@functools.cache
def _fields(section: type, *kinds: _Path) -> tuple[str, ...]:
    hints = typing.get_type_hints(section, include_extras=True)
    return tuple(n for n, hint in hints.items() if any(m in kinds for m in getattr(hint, "__metadata__", ())))


def _split(text: str) -> tuple[str, str]:
    prefix = next((p for p in _PREFIXES if text.startswith(p)), "")
    return prefix, text[len(prefix) :]


def _absolute(text: str, folder: pathlib.Path) -> str:
    prefix, path = _split(text)
    if not path or "://" in path or path.startswith("~") or (prefix == "hf:" and not (folder / path).exists()):
        return text
    return prefix + os.path.normpath(os.path.join(folder, path))
