"""Exact match after normalisation."""

import unicodedata

from bridge.types import Finish, Task


def score(response_text: str, task: Task, finish: Finish) -> float:
    """1 if response and answer are the same text, else 0; case, Unicode form, white space and finish don't count."""
    del finish
    return float(_normalize(response_text) == _normalize(task.answer))


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
