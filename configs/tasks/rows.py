"""Rows of environments: types and helpers of row generators."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")

Args = Mapping[str, int | float | str | bool]
"""Arguments of an environment's rows in a config."""

Style = Literal["words", "short"]
"""Prompt style. words: sentences, for a model that can read. short: few characters, for a tiny model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """Start of one episode."""

    question: str
    """Text of the prompt."""
    role: Literal["user", "system"] = "user"
    """Role of the question in a chat template. system: the environment provides the first user message."""
    answer: str = ""
    metadata: Mapping[str, Any]
    """JSON values that the environment reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Part of an example episode."""

    text: str
    by_policy: bool
    """True for a policy turn, without its end token. False for an observation."""


def draw(seed: int, index: int) -> random.Random:
    """Returns the random generator of row `index`."""
    return random.Random(f"{seed}.{index}")  # a text seed is identical in every process


def read_args(kind: type[T], environment: str, args: Args) -> T:
    """Returns a dataclass of arguments; raises ValueError if one is unknown or has not the type of its default."""
    defaults = vars(kind())
    for name, value in args.items():
        if name not in defaults:
            raise ValueError(
                f"environment {environment} has no argument {name!r}; expected one of {', '.join(defaults)}"
            )
        wanted = cast(type[object], type(defaults[name]))
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"environment {environment}: {name} must be {wanted.__name__}, got {value!r}")
    return kind(**args)
