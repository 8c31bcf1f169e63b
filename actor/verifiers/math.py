"""Mathematical equality, by the math-verify library (parses LaTeX and plain expressions)."""

import json
import logging
from typing import Any

import math_verify

from actor.verifiers.conclusion import conclusion
from actor.verifiers.judged import Context, Response
from bridge.types import Task

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, once a call, that its time limits are off


def score(response: Response, task: Task, context: Context) -> float:
    """1 if the answer that the response states equals the task's, else 0; however the response ended.

    The task's metadata says where the answer is looked for: {"answer_in": "conclusion" or "text"}, the first if it says
    nothing (`prompts.answer_in`).

    The library's own time limits are off: they would turn a timeout into a wrong answer. The pool's holds.

    Raises:
      ValueError: the task's answer can't be parsed.
    """
    del context
    gold = _parse(_marked(task.answer))
    if not gold:
        raise ValueError(f"the answer {task.answer!r} is no mathematical expression")
    stated = conclusion(response.text)
    if stated is not None:
        answer = _parse(f"\\boxed{{{stated}}}")
    elif json.loads(task.metadata).get("answer_in") == "text":
        answer = _parse(response.text)
    else:
        return 0.0
    return float(math_verify.verify(gold, answer, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _marked(answer: str) -> str:
    # Bare LaTeX is recognised only inside an environment.
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
