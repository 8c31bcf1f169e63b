"""Problems: question, prompt tokens and reward task. Imports neither jax nor grain.

A hash of the question's text selects held-out problems, so a held-out question never trains under any index, epoch,
seed, source or system message.
"""

import dataclasses
import decimal
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from bridge.rollout_types import RewardPart, Task
from bridge.text.chat_template import JsonObject

Answer = str | int | float | decimal.Decimal


@dataclasses.dataclass(frozen=True)
class Completion:
    """Tokens after a prompt that the model learns to write."""

    tokens: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    """True at trained tokens: the assistant's, with the token that ends each of its turns."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tokenized prompt and its reward task."""

    question: str
    prompt_tokens: Int32[np.ndarray, " P"]
    task: Task
    source: str = ""
    """Name of the source in `prompts.mixture`; empty for a single source."""
    completions: tuple[Completion, ...] = ()
    """Completions of a supervised row; empty in reinforcement learning. A conversation has several if its template
    renders earlier turns differently when later ones follow."""
    asked: str = ""
    """Text of the question without system messages; empty: `question`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt with its longest completion."""
        return self.prompt_tokens.size + max((c.tokens.size for c in self.completions), default=0)


@dataclasses.dataclass(frozen=True)
class RawProblem:
    """Problem before tokenization."""

    question: str
    messages: tuple[JsonObject, ...]
    """Conversation of the row; empty if `question` is the prompt."""
    task: Task
    row: int = 0
    """Row number in the file, from 1; 0 for a generated problem."""
    tools: tuple[JsonObject, ...] = ()
    """JSON schemas of the tools, for the chat template."""
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Chat template variables, which override `prompts.template_arguments`."""
    response: str = ""
    """Text that a supervised row's model learns to write after the prompt; empty: the assistant messages."""
    asked: str = ""
    """Text of the question without system messages; empty: `question`."""


@dataclasses.dataclass(frozen=True)
class BadRow:
    """Quarantined row and the reason."""

    row: int
    """Row number, from 1; the index for generated rows."""
    reason: str
    path: str = ""
    """File, data set or generator of the row."""
    is_too_long: bool = False
    """True if the row is well-formed but its prompt is too long or empty."""

    @classmethod
    def of_size(cls, row: int, size: int, *, max_tokens: int, path: str, what: str = "prompt") -> "BadRow":
        """Returns a row whose prompt, or what else `what` names, has `size` tokens."""
        return cls(row, f"{what} has {size} tokens, expected 1 to {max_tokens}", path, is_too_long=True)


def answer_text(answer: Answer) -> str:
    """Returns an answer in the form used for comparison: numbers as plain digits whatever their type, text unchanged.

    42.0, Decimal("42.00") and 42 are "42", 1e16 is "10000000000000000", 1e-7 is "0.0000001".
    """
    if isinstance(answer, str | int):
        return str(answer)
    exact = decimal.Decimal(repr(answer)) if isinstance(answer, float) else answer
    digits = f"{exact:f}"
    plain = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if plain == "-0" else plain


def task_of(
    answer: Answer,
    parts: Mapping[str, float],
    *,
    answer_in: str,
    metadata: Mapping[str, Any] | None = None,
    environment: str = "",
    teacher: str = "",
) -> Task:
    """Returns the task that scores a response; `parts` are reward weights by verifier.

    `answer` is text or a finite number, empty if only an environment rewards. `metadata` is for verifiers and the
    environment.
    """
    known = dict(metadata or {})
    if "math" in parts:
        known["answer_in"] = answer_in
    return Task(
        rewards=tuple(RewardPart(name, weight) for name, weight in parts.items()),
        answer=answer_text(answer),
        metadata=json.dumps(known, default=str),
        environment=environment,
        teacher=teacher,
    )


def question_key(problem: Problem | RawProblem) -> str:
    """Returns the text by which training and evaluation tell questions apart: without system messages, stripped."""
    return (problem.asked or problem.question).strip()


def is_held_out(question: str, one_in: int) -> bool:
    """Returns True if the hash of a question's text assigns it to evaluation."""
    digest = hashlib.sha256(question.strip().encode()).digest()
    return int.from_bytes(digest[:8], "little") % one_in == 0
