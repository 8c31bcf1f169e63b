"""One row of prompts for an environment, and where to get one."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")

Args = Mapping[str, int | float | str | bool]
"""What a configuration says of an environment's rows."""

Style = Literal["words", "short"]
"""words: sentences, for a model that can read. short: as few characters as possible, for one that is tiny."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode's start."""

    question: str
    """The prompt's text; without a chat template the prompt."""
    role: Literal["user", "system"] = "user"
    """Of the question, with a chat template. system: the first thing that a user says is the environment's."""
    answer: str = ""
    metadata: Mapping[str, Any]
    """What the environment reads, as JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A piece of an example of how an episode may go."""

    text: str
    by_policy: bool
    """It is a turn of the policy, without the token that ends it; else an observation."""


def draw(seed: int, index: int) -> random.Random:
    """What row `index` is drawn by."""
    return random.Random(f"{seed}.{index}")  # text: its hash is the same in every process


def read_args(kind: type[T], environment: str, args: Args) -> T:
    """A dataclass of arguments, each of the type of its default.

    Raises:
      ValueError: an argument is unknown or of another type.
    """
    defaults = vars(kind())
    for name, value in args.items():
        if name not in defaults:
            raise ValueError(f"environment {environment} has no argument {name!r}; there are {', '.join(defaults)}")
        wanted = cast(type[object], type(defaults[name]))
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"environment {environment}: {name} must be {wanted.__name__}, got {value!r}")
    return kind(**args)
