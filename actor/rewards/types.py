"""Input and output types of verifiers."""

import decimal
import math
import numbers
from collections.abc import Callable, Sequence

import msgspec
from blake3 import blake3

from bridge.rollout_types import MAX_ANSWER_CHARS, Finish, Task, Verdict
from bridge.text import thinking
from configs.sections import RewardsConfig


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Response in its parts, as verifiers receive it; of an episode its last turn."""

    text: str
    """Sampled text, with special tokens and without the stop token."""
    finish: Finish
    num_tokens: int
    """Sampled tokens, over all turns of an episode."""
    begun_by_prompt: str | None = None
    """Prefilled part of the assistant's message, such as `<think>`; `text` continues it. None means unknown: a closing
    mark without an opening one then implies that the prompt opened the thinking."""
    parts: thinking.Parts | None = None
    """Thinking and answer, without special tokens. None: split by the generally known marks."""
    num_thinking_tokens: int = 0
    """Tokens outside answers, over all turns of an episode; 0 for a response without thinking."""

    def __post_init__(self) -> None:
        if self.parts is None:
            parts = thinking.DEFAULT.split(self.text, begun=self.begun_by_prompt)
            msgspec.structs.force_setattr(self, "parts", parts)

    @property
    def answer(self) -> str:
        """Text outside the thinking, which answer verifiers read; empty if the thinking is unfinished."""
        assert self.parts is not None
        return self.parts.answer

    @property
    def thinking(self) -> str:
        """Text within the thinking, without its marks."""
        assert self.parts is not None
        return self.parts.thinking

    @property
    def is_thinking_finished(self) -> bool:
        """False if the response ends within its thinking and so has no answer."""
        assert self.parts is not None
        return self.parts.is_finished

    @property
    def message(self) -> str:
        """Whole assistant message: prefilled part and sampled text."""
        assert self.parts is not None
        begun = self.parts.implied if self.begun_by_prompt is None else self.begun_by_prompt
        return begun + self.text


class NoNumberError(ValueError):
    """Invalid verifier result that no response could turn into a number."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Verifier result for a response."""

    value: float
    verdict: Verdict
    case_s: tuple[float, ...] = ()
    """Seconds used per test case (`Outcome.seconds`), in the task's order: of all cases if all passed, up to the case
    that exceeded its timeout for the verdict `timeout`."""
    answer: str | None = None
    """Extracted answer (`answer_key`), empty if the response states none; None if the verifier extracts none."""

    @classmethod
    def of(cls, value: object, *, answer: str | None = None) -> "Score":
        """Returns the score of a plain number: wrong unless it is above 0.

        A NumPy scalar, or a zero-dimensional array or tensor, counts as its value. Raises ValueError if the value is
        not finite (NoNumberError: not a number, or out of a float's range).
        """
        if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(value, numbers.Real | decimal.Decimal):
            raise NoNumberError(f"a verifier must return a finite number, got {value!r}")
        try:
            number = float(value)
        except OverflowError:
            raise NoNumberError("a verifier must return a finite number, got one outside the range of float") from None
        if not math.isfinite(number):
            raise ValueError(f"a verifier must return a finite number, got {number!r}")
        return cls(value=number, verdict="ok" if number > 0 else "wrong", answer=answer)


def answer_key(text: str) -> str:
    """Returns an answer's compact form: normalized white space; a long answer is cut and ends in its hash."""
    text = " ".join(text.split())
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    digest = blake3(text.encode("utf-8", "surrogatepass")).hexdigest(16)
    return f"{text[: MAX_ANSWER_CHARS - len(digest) - 1]}#{digest}"


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """Verifier inputs shared by all responses of a process, besides the response and its problem."""

    settings: RewardsConfig = RewardsConfig()
    case_timeouts_s: Sequence[float] = ()
    """Timeouts per test case of the task, in seconds; others have `settings.max_timeout_s`. In a worker this is
    `verifier_worker.LiveTimeouts`: re-read it while a case runs."""


Verifier = Callable[[Response, Task, Context], Score]
