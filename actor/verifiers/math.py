"""Mathematical equality, by the math-verify library (parses LaTeX and plain expressions)."""

import logging

import math_verify

from bridge.types import Task

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, once a call, that its time limits are off


def score(response_text: str, task: Task) -> float:
    """1 if the response's final expression equals the answer, else 0.

    The library's own time limits are off: they would turn a timeout into a wrong answer. The pool's holds.

    Raises:
      ValueError: the answer itself can't be parsed.
    """
    gold = math_verify.parse(_marked(task.answer), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"the answer {task.answer!r} is no mathematical expression")
    response = math_verify.parse(response_text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(math_verify.verify(gold, response, timeout_seconds=None))


def _marked(answer: str) -> str:
    # Bare LaTeX is recognised only inside an environment.
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
