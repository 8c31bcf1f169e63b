"""What a verifier is told, and what it answers."""

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
    """A response in its parts, as verifiers get it; of an episode its last turn."""

    text: str
    """Everything that the policy wrote, special tokens as text, without the token that ended it."""
    finish: Finish
    num_tokens: int
    """Sampled tokens; of an episode those of all its turns."""
    begun_by_prompt: str | None = None
    """The part of the assistant's message that the prompt holds, such as `<think>`; `text` continues it. None: not
    known; a closing mark without an opening one then says that the prompt opened the thinking."""
    parts: thinking.Parts | None = None
    """Thinking and answer, without special tokens. None: they are split by the marks that are known of any model."""
    num_thinking_tokens: int = 0
    """Tokens that are not of an answer; of an episode those of all its turns. 0 for a response that does not think."""

    def __post_init__(self) -> None:
        if self.parts is None:
            parts = thinking.DEFAULT.split(self.text, begun=self.begun_by_prompt)
            msgspec.structs.force_setattr(self, "parts", parts)

    @property
    def answer(self) -> str:
        """Text outside the thinking: what verifiers of answers read. Empty where the thinking is unfinished."""
        assert self.parts is not None
        return self.parts.answer

    @property
    def thinking(self) -> str:
        """Text within the thinking, without its marks."""
        assert self.parts is not None
        return self.parts.thinking

    @property
    def is_thinking_finished(self) -> bool:
        """False where the response ends within its thinking, and so has no answer."""
        assert self.parts is not None
        return self.parts.is_finished

    @property
    def message(self) -> str:
        """The assistant's whole message: what the prompt began of it, and what the policy wrote."""
        assert self.parts is not None
        begun = self.parts.implied if self.begun_by_prompt is None else self.begun_by_prompt
        return begun + self.text


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
          ValueError: it is not finite (NoNumberError: or no number, or one that no float holds).
        """
        if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
            value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(value, numbers.Real | decimal.Decimal):
            raise NoNumberError(f"a verifier must return a finite number, got {value!r}")
        try:
            number = float(value)
        except OverflowError:
            raise NoNumberError("a verifier must return a finite number, got one that no float holds") from None
        if not math.isfinite(number):
            raise ValueError(f"a verifier must return a finite number, got {number!r}")
        return cls(value=number, verdict="ok" if number > 0 else "wrong", answer=answer)


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
