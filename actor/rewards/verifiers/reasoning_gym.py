"""Verifier `reasoning_gym`: the library's own scoring; the task's metadata is the library's entry, as JSON."""

import functools
import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from actor.rewards.types import Context, Response, Score, answer_key
from actor.rewards.verifiers.cpu_time import MAX_CPU_S, limited
from bridge.rollout_types import Task

TASK_ARGS = "task_args"
"""Field of an entry with the arguments that its family's problems were made with (`prompts.task_args`)."""
_GRIDS = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}
"""Fields that a family compares with tuples of tuples, which JSON turned into lists."""


def _are_close(stated: str, entry: dict[str, Any]) -> bool:
    probabilities = [float(Fraction(text.replace(",", ""))) for text in (stated, entry["answer"])]
    return abs(probabilities[0] - probabilities[1]) <= 1e-4


_CHECKS: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "coin_flip": _are_close,  # else a prefix such as 0 is right
    "complex_arithmetic": lambda stated, entry: "nan" not in stated.casefold(),
    "game_of_life_halting": lambda stated, entry: stated.strip(" .").casefold() == entry["answer"].casefold(),
    "puzzle24": lambda stated, entry: (
        sorted(map(int, re.findall(r"\d+", stated))) == sorted(entry["metadata"]["numbers"])
    ),
}
"""Conditions of full credit in families whose own scoring gives it to the same text for every problem."""


def score(response: Response, task: Task, context: Context) -> Score:
    """Returns the task family's `score_answer`, in [0, 1]; truncation is ignored.

    It scores the text in the last <answer>...</answer>, the library's convention for a response that reasons first,
    else the whole stripped response. Some families give partial credit for any text, so only full credit counts as
    right. Raises ValueError if the metadata names no task family.
    """
    del context
    entry = json.loads(task.metadata)
    family = entry.get("metadata", {}).get("source_dataset")
    if not family:
        raise ValueError("Task.metadata holds no reasoning-gym entry (metadata.source_dataset is missing)")
    for grid in _GRIDS.get(family, ()):
        entry["metadata"][grid] = tuple(map(tuple, entry["metadata"][grid]))
    stated = _stated(response.answer)
    score_answer = _score_answer(family, json.dumps(entry.pop(TASK_ARGS, {}), sort_keys=True))
    value = limited(lambda: float(score_answer(stated, entry)), limit_s=MAX_CPU_S, otherwise=0.0)
    if value >= 1 and family in _CHECKS and not _CHECKS[family](stated, entry):
        value = 0.0
    return Score(value=value, verdict="ok" if value >= 1 else "wrong", answer=answer_key(stated))


def _stated(text: str) -> str:
    """Returns the content of the last closed tag, else the stripped text; open tags would take quadratic time."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    stated = extract_answer(text[begin : end + len("</answer>")]) if begin >= 0 else None
    return text.strip() if stated is None else stated


@functools.cache
def _score_answer(family: str, task_args: str) -> Any:  # the library's annotation has no arguments
    """Returns the scoring of a family's problems that were made with arguments, which may be a tolerance."""
    if not (arguments := json.loads(task_args)):
        return reasoning_gym.get_score_answer_fn(family)
    return reasoning_gym.create_dataset(family, **arguments | {"size": 1}).score_answer
