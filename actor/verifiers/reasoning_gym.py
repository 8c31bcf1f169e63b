"""reasoning-gym's own verifiers; the task's metadata is the library's entry, as JSON."""

import functools
import json
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from actor.verifiers.judged import Context, Response, Score, answer_key
from bridge.types import Task

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
    stated = extract_answer(response.answer)
    if stated is None:
        stated = response.answer.strip()
    value = float(_score_answer(family)(stated, entry))
    return Score(value=value, verdict="ok" if value >= 1 else "wrong", answer=answer_key(stated))


@functools.cache
def _score_answer(family: str) -> Any:  # the library annotates it as taking nothing
    return reasoning_gym.get_score_answer_fn(family)
