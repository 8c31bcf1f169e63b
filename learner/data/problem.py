"""Problems: a question, its prompt tokens and how its answer is judged. No jax and no grain here.

Which are held out for evaluation is decided by a hash of the question's text, so a held-out question can enter training
from no index, epoch, seed or source.
"""

import dataclasses
import decimal
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from bridge.rollout_types import RewardPart, Task
from bridge.text.chat_template import JsonObject

Answer = str | int | float | decimal.Decimal


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt and its judge."""

    question: str
    prompt_tokens: Int32[np.ndarray, " P"]
    task: Task
    source: str = ""
    """Name of its source in `prompts.mixture`; empty where there is one source."""


@dataclasses.dataclass(frozen=True)
class RawProblem:
    """A problem before tokenization."""

    question: str
    messages: tuple[JsonObject, ...]
    """Set when the row holds a conversation; else the question is the prompt."""
    task: Task
    row: int = 0
    """The row of the file it came from, counted from 1; 0 for a procedural problem."""
    environment: str = ""
    """Name of the environment that it is an episode of."""
    tools: tuple[JsonObject, ...] = ()
    """Schemas of what may be called, for the chat template."""
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Variables of the chat template, over those of `prompts.template_arguments`."""


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that was set aside, and why."""

    row: int
    """Counted from 1; of rows made by index, the index."""
    reason: str
    path: str = ""
    """Its file or data set, or what makes it."""
    is_too_long: bool = False
    """Well-formed, but longer than a prompt may be, or empty."""

    @classmethod
    def of_size(cls, row: int, size: int, *, max_tokens: int, path: str) -> "BadRow":
        """One whose prompt has `size` tokens."""
        return cls(row, f"prompt has {size} tokens, want 1 to {max_tokens}", path, is_too_long=True)


def answer_text(answer: Answer) -> str:
    """Returns an answer as it is compared: a number in plain digits, whatever type a file has for it.

    42.0, Decimal("42.00") and 42 are "42", 1e16 is "10000000000000000", 1e-7 is "0.0000001"; text stays as it is.
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
) -> Task:
    """What a response is judged by.

    Args:
      answer: text or a finite number; empty where only an environment rewards.
      parts: weights by verifier.
      answer_in: where verifier=math looks for a response's answer.
      metadata: the row's, or a procedural problem's entry; for verifiers and the environment.
      environment: name of the one that a response is an episode of.
    """
    known = dict(metadata or {})
    if "math" in parts:
        known["answer_in"] = answer_in
    return Task(
        rewards=tuple(RewardPart(name, weight) for name, weight in parts.items()),
        answer=answer_text(answer),
        metadata=json.dumps(known, default=str),
        environment=environment,
    )


def is_held_out(question: str, one_in: int) -> bool:
    """Whether a question belongs to evaluation, by its text alone."""
    digest = hashlib.sha256(question.strip().encode()).digest()
    return int.from_bytes(digest[:8], "little") % one_in == 0
