"""reasoning-gym's own verifiers; the task's metadata is the library's entry, as JSON."""

import functools
import json
from typing import Any

import reasoning_gym

from actor.verifiers.judged import Context, Response, Score, answer_key
from bridge.types import Task

_GRIDS = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}
"""Where families compare with tuples of tuples, of which JSON has made lists."""


def score(response: Response, task: Task, context: Context) -> Score:
    """What the task family's `score_answer` gives for the whole response, stripped; 0 to 1. How it ended doesn't count.

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
    value = float(_score_answer(family)(response.text.strip(), entry))
    return Score(value=value, verdict="ok" if value >= 1 else "wrong", answer=answer_key(response.text))


@functools.cache
def _score_answer(family: str) -> Any:  # the library annotates it as taking nothing
    return reasoning_gym.get_score_answer_fn(family)
