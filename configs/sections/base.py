"""What all sections of the configuration share: ranges of numbers and kinds of paths, declared in annotations.

A path's `~` is replaced when its section is made; relative paths become absolute on the machine that sets the run up.
"""

import dataclasses
import enum
import functools
import math
import os
import pathlib
import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from bridge.rollout_types import MAX_ABS_REWARD, MAX_TEMPERATURE, MIN_TEMPERATURE

T = TypeVar("T")

_LARGEST = 2.0**53
"""The largest bound of a range that names none: every whole number up to it is a float64."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The finite numbers from `low` to `high`; `excludes_low` leaves `low` itself out."""

    low: float
    high: float = _LARGEST
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        """Returns True if the value is a number of the range; NaN and infinities never are."""
        return math.isfinite(value) and self.low <= value <= self.high and not (self.excludes_low and value == self.low)

    def wanted(self, value: float) -> str:
        """Returns what an error message says a refused value must be: the whole range, or a wide one's missed bound."""
        if not math.isfinite(value):
            return "finite"
        if self.high <= 1e6:
            return f"in {'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"
        return f"<= {self.high:.0f}" if value > self.high else f"{'>' if self.excludes_low else '>='} {self.low:g}"


Count = Annotated[int, Range(0, 2**31 - 1, excludes_low=True)]
CountOrZero = Annotated[int, Range(0, 2**31 - 1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""Seed that every generator of a run takes: grain's seeds have 32 bits."""
Seconds = Annotated[float, Range(0, 1e9, excludes_low=True)]
"""At most 31 years: threads and timers overflow not far above."""
SecondsOrZero = Annotated[float, Range(0, 1e9)]
WholeSeconds = Annotated[int, Range(0, 1e9, excludes_low=True)]
Fraction = Annotated[float, Range(0, 1, excludes_low=True)]
FractionOrZero = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, excludes_low=True)]
NotNegative = Annotated[float, Range(0)]
Finite = Annotated[float, Range(-_LARGEST)]
Weight = Annotated[float, Range(1e-6, 1e6)]
"""A share's weight: the shares of two sources can still be counted in whole parts."""
Reward = Annotated[float, Range(-MAX_ABS_REWARD, MAX_ABS_REWARD)]

_PREFIXES = ("hf:", "file://", "sqlite:///")
"""Prefixes of a local path."""


class _Path(enum.Enum):
    """Marks a text field as a path, by whose machine has it."""

    LOCAL = enum.auto()
    ACTOR = enum.auto()
    ACTOR_COMMAND = enum.auto()


LocalPath = Annotated[str, _Path.LOCAL]
"""A path, or a URL with a local path (`file://`, `sqlite:///`), or `hf:` and a folder; empty where there is none."""
ActorPath = Annotated[str, _Path.ACTOR]
"""A path of each actor's machine, whose `~` is the home of the actor's user; empty where there is none."""
ActorCommand = Annotated[str, _Path.ACTOR_COMMAND]
"""A program: a path of each actor's machine, or a name without a slash that is looked for in PATH; empty: none."""


class CheckedSection:
    """A section of the configuration: its local paths have their `~` replaced, its numbers lie in their ranges."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number out of its field's range, or a `~` that names no home folder."""
        expand_home(self)
        check_ranges(type(self).__name__.removesuffix("Config").lower(), self)


def check_ranges(where: str, section: object) -> None:
    """Raises ValueError if a number of a section is outside the range of its annotation; None is in every range.

    Args:
      where: The section's path in the config, as in "rounds".
      section: A dataclass whose numbers are annotated with a `Range`; a dict is checked by entry, numbers alone.
    """
    for name, found in _ranges(type(section)).items():
        for entry, value in _entries(name, getattr(section, name)):
            if isinstance(value, int | float) and value not in found:
                raise ValueError(f"{where}.{entry} must be {found.wanted(value)}, got {value}")


def temperature(section: str, value: float) -> None:
    """Refuses a sampling temperature at which vLLM does not sample as it is told.

    Raises:
      ValueError: names the field.
    """
    if not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"{section}.temperature must be in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}] (vLLM raises what is lower to "
            f"{MIN_TEMPERATURE}, and refuses what is higher), got {value}"
        )


def check_pattern(where: str, pattern: str, *, needs_group: bool) -> None:
    """Raises ValueError if a field's text is no regular expression, or lacks the group that it needs."""
    try:
        groups = re.compile(pattern).groups
    except re.error as e:
        raise ValueError(f"{where} is no regular expression: {e}") from e
    if needs_group and groups < 1:
        raise ValueError(f"{where} needs a group in parentheses, got {pattern!r}")


def is_core_list(text: str) -> bool:
    """Whether it is like "0", "0-3" or "0,2-3"."""
    bounds = [part.split("-") for part in text.split(",")]
    return all(len(b) <= 2 and all(n.strip().isdecimal() for n in b) and int(b[0]) <= int(b[-1]) for b in bounds)


@functools.cache
def _ranges(section: type) -> dict[str, Range]:
    """Returns by field the range of its annotation, or of a dict's values."""
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
    """Replaces a leading `~` or `~user` in every `LocalPath` of a frozen dataclass that is being made.

    Raises:
      ValueError: no such user has a home folder here.
    """
    for name in _fields(type(section), _Path.LOCAL):
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
        elif field.name in _fields(type(config), _Path.ACTOR_COMMAND) and os.sep not in value:
            continue
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
