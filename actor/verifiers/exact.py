"""Exact match after normalisation."""

import unicodedata

from actor.verifiers.judged import Context, Response
from bridge.types import Task


def score(response: Response, task: Task, context: Context) -> float:
    """1 if response and answer are the same text, else 0; case, Unicode form, white space and finish don't count."""
    del context
    return float(_normalize(response.text) == _normalize(task.answer))


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
