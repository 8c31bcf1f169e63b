"""What a verifier is told, and what it answers."""

import math
import numbers
from collections.abc import Callable, Sequence

import msgspec
from blake3 import blake3

from bridge.types import MAX_ANSWER_CHARS, Finish, Task, Verdict
from configs.sections import RewardsConfig


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged. Of an episode of several turns it is the last turn: what the policy says in the end."""

    text: str
    finish: Finish
    num_tokens: int
    """That the policy sampled; of an episode in all its turns."""


class NoNumberError(ValueError):
    """A verifier returned something that is no number, whatever the response was."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier gives a response."""

    value: float
    verdict: Verdict
    case_s: tuple[float, ...] = ()
    """Seconds that each test case used (`Outcome.seconds`), of an answer that passed all; in the task's order."""
    answer: str | None = None
    """The answer that was read (`answer_key`), empty where the response states none; None: it reads none."""

    @classmethod
    def of(cls, value: object, *, answer: str | None = None) -> "Score":
        """The score of a plain number: wrong if it is not above 0.

        A NumPy scalar, or an array or tensor of no dimensions, counts as its value.

        Raises:
          ValueError: it is not finite (NoNumberError: or no number).
        """
        if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(value, numbers.Real):
            raise NoNumberError(f"a verifier must return a finite number, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"a verifier must return a finite number, got {value!r}")
        return cls(value=float(value), verdict="ok" if float(value) > 0 else "wrong", answer=answer)


def answer_key(text: str) -> str:
    """An answer as it travels: white space counts once, and a long one ends in a hash, so that no two become alike."""
    text = " ".join(text.split())
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    digest = blake3(text.encode("utf-8", "surrogatepass")).hexdigest(16)
    return f"{text[: MAX_ANSWER_CHARS - len(digest) - 1]}#{digest}"


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for more than one response."""

    settings: RewardsConfig = RewardsConfig()
    case_timeouts_s: Sequence[float] = ()
    """Timeouts by test case of the task, in seconds; the others have `settings.max_timeout_s`. A worker hands over
    `worker.LiveTimeouts`: read it again while a case runs."""


Verifier = Callable[[Response, Task, Context], Score]
