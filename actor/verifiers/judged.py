"""What a verifier is told, and what it answers."""

import math
import numbers
from collections.abc import Callable

import msgspec

from bridge.types import Finish, Task, Verdict
from configs.sections import RewardsConfig


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged. Of an episode of several turns it is the last turn: what the policy says in the end."""

    text: str
    finish: Finish
    num_tokens: int
    """That the policy sampled; of an episode in all its turns."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier gives a response."""

    value: float
    verdict: Verdict
    case_s: tuple[float, ...] = ()
    """Seconds that each test case took, of an answer that passed them all; in the task's order."""

    @classmethod
    def of(cls, value: object) -> "Score":
        """The score of a plain number: wrong if it is not above 0.

        Raises:
          ValueError: it is no finite number.
        """
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"a verifier must return a finite number, got {value!r}")
        return cls(value=float(value), verdict="ok" if float(value) > 0 else "wrong")


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for more than one response."""

    settings: RewardsConfig = RewardsConfig()
    case_timeouts_s: tuple[float, ...] = ()
    """By test case of the task; those that have none here have `settings.max_timeout_s`."""


Verifier = Callable[[Response, Task, Context], Score]
