"""Verifiers `exact` and `format`."""

import functools
import json
import re
import unicodedata

from actor.rewards.types import Context, Response, Score, answer_key
from actor.rewards.verifiers.cpu_time import MAX_CPU_S, limited
from bridge.rollout_types import Task


def score_exact(response: Response, task: Task, context: Context) -> Score:
    """Returns 1 if the response's answer is the task's, else 0; ignores case, Unicode form and white space."""
    del context
    text = _normalize(response.answer)
    return Score.of(float(text == _normalize(task.answer)), answer=answer_key(text))


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def score_format(response: Response, task: Task, context: Context) -> float:
    """Returns 1 if the assistant's whole message, stripped, matches the pattern, else 0.

    The message begins with the prefilled text, such as `<think>`, and shows special tokens as text. The pattern is the
    row's (metadata "format"), or `rewards.format_pattern`. A match that exceeds `cpu_time.MAX_CPU_S` scores 0. Raises
    ValueError if there is no pattern, or it is no regular expression.
    """
    pattern = json.loads(task.metadata).get("format") or context.settings.format_pattern
    if not pattern:
        raise ValueError("verifier=format requires rewards.format_pattern, or a pattern in the row's metadata (format)")
    compiled, text = _compiled(pattern), response.message.strip()
    return limited(lambda: float(compiled.fullmatch(text) is not None), limit_s=MAX_CPU_S, otherwise=0.0)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as e:
        raise ValueError(f"the format pattern {pattern!r} is not a regular expression: {e}") from e
