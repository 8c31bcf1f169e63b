"""reasoning-gym's own verifiers; the task's metadata is the library's entry, as JSON."""

import functools
import json
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from actor.rewards.types import Context, Response, Score, answer_key
from actor.rewards.verifiers.cpu_time import MAX_CPU_S, limited
from bridge.rollout_types import Task

_GRIDS = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}
"""Where families compare with tuples of tuples, of which JSON has made lists."""


def score(response: Response, task: Task, context: Context) -> Score:
    """What the task family's `score_answer` gives; 0 to 1. How the response ended doesn't count.

    Judged is what stands in its last <answer>...</answer>, the library's own convention for a response that reasons
    first, and without any the whole response, stripped.

    Some families give a little for any text: right is what earns all.

    Raises:
      ValueError: the metadata names no task family.
    """
    del context
    entry = json.loads(task.metadata)
    family = entry.get("metadata", {}).get("source_dataset")
    if not family:
        raise ValueError("Task.metadata holds no reasoning-gym entry (metadata.source_dataset is missing)")
    for grid in _GRIDS.get(family, ()):
        entry["metadata"][grid] = tuple(map(tuple, entry["metadata"][grid]))
    stated = _stated(response.answer)
    score_answer = _score_answer(family)
    value = limited(lambda: float(score_answer(stated, entry)), limit_s=MAX_CPU_S, otherwise=0.0)
    return Score(value=value, verdict="ok" if value >= 1 else "wrong", answer=answer_key(stated))


def _stated(text: str) -> str:
    """Returns what the last closed tag holds, or the stripped text; open tags would take the library quadratic time."""
    closed = text[: text.rfind("</answer>") + len("</answer>")] if "</answer>" in text else ""
    stated = extract_answer(closed)
    return text.strip() if stated is None else stated


@functools.cache
def _score_answer(family: str) -> Any:  # the library annotates it as taking nothing
    return reasoning_gym.get_score_answer_fn(family)
