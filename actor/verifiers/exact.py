"""Exact match after normalisation."""

import unicodedata

from actor.verifiers.judged import Context, Response, Score, answer_key
from bridge.types import Task


def score(response: Response, task: Task, context: Context) -> Score:
    """Returns 1 if the response's answer is the task's, else 0; case, Unicode form and white space don't count."""
    del context
    text = _normalize(response.answer)
    return Score.of(float(text == _normalize(task.answer)), answer=answer_key(text))


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
