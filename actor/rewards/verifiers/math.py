"""Mathematical equality, by the math-verify library (parses LaTeX and plain expressions).

Where we decide otherwise than the library, and why: docs/math_answers.md.
"""

import functools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import math_verify
import sympy

from actor.rewards.types import Context, Response, Score, answer_key
from actor.rewards.verifiers import math_equality, math_expression, math_forms, math_normalize, math_units
from actor.rewards.verifiers.cpu_time import MAX_CPU_S, limited
from actor.rewards.verifiers.math_expression import computed
from actor.rewards.verifiers.math_extract import extract_answer, last_number
from bridge.rollout_types import Task

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, once a call, that its time limits are off

_SOLUTION = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])|####|<answer>|\banswer\b", re.IGNORECASE)
_MAX_WHOLE = 1e20
"""Whole numbers below it are told apart in every digit."""


def score(response: Response, task: Task, context: Context) -> Score:
    """Returns 1 if the answer that the response states equals the task's, else 0.

    A response that was cut off is judged by its whole sentences (`conclusion`).

    The task's metadata says where the answer is looked for: {"answer_in": "conclusion", "text" or "number"}, the first
    if it says nothing (`prompts.answer_in`).

    The library's own time limits are off: they would call what a busy machine does late wrong. The limit is on the
    processor time (`cpu_time.MAX_CPU_S`).

    Raises:
      ValueError: the task's answer states nothing.
    """
    del context
    gold = _gold(task.answer)
    if not gold:
        raise ValueError(f"the answer {task.answer!r} is no mathematical expression")
    is_cut = response.finish == "length"
    in_words = math_equality.is_in_words(gold)
    stated = extract_answer(response.answer, is_cut=is_cut, in_words=in_words)
    answer_in = json.loads(task.metadata).get("answer_in")
    wants_number = answer_in == "number" and math_normalize.is_number(gold)
    if stated is None and wants_number:
        stated = last_number(response.answer[-math_normalize.MAX_CHARS :], is_cut=is_cut)
    if stated is not None:
        if math_normalize.is_too_long(stated, gold):
            return Score.of(float(stated == task.answer), answer=answer_key(stated))
        stated = math_normalize.normalize_latex(stated, has_e=math_normalize.names_e(gold))
        if wants_number and not math_normalize.is_worked_out(stated):
            # The question itself equals its answer: a policy that is paid for it says 23 + 48 where that was asked.
            return Score.of(0.0, answer=answer_key(stated))  # no vote for what it would come to
        is_right = limited(lambda: math_equality.are_equal(gold, stated), limit_s=MAX_CPU_S, otherwise=None)
        if is_right is None:  # its vote would take as long
            return Score.of(0.0, answer=answer_key(stated))
        return Score.of(float(is_right), answer=_key(gold, gold if is_right else stated))  # right ones vote as one
    if answer_in == "text":
        tail = " ".join(response.answer[-math_normalize.MAX_CHARS :].split())
        found = limited(lambda: _anywhere(tail), limit_s=MAX_CPU_S, otherwise=[])
        is_right = limited(lambda: _is_any(gold, found), limit_s=MAX_CPU_S, otherwise=False)
        return Score.of(float(is_right), answer=_key(gold, gold) if is_right else canonical("", found))
    return Score.of(0.0, answer="")


@functools.lru_cache(maxsize=32)
def _gold(answer: str) -> str:
    """Returns the expression of a gold answer; of a whole solution what it states."""
    stated = extract_answer(answer, in_words=True) if _SOLUTION.search(answer) else None
    text = stated or answer
    return math_normalize.normalize_latex(text, has_e=not math_normalize.is_scientific(text))


def _anywhere(text: str) -> list[Any]:
    """Returns what the library reads as the last expression of a text."""
    return computed(lambda: math_verify.parse(text, parsing_timeout=None)) or []  # pyright: ignore[reportArgumentType]


def _is_any(gold: str, found: list[Any]) -> bool:
    parsed = math_expression.read(gold)
    return parsed is not None and any(math_equality.are_equal_objects(parsed, one) for one in found)


def _key(gold: str, stated: str) -> str:
    """Returns the form in which a stated answer votes; a percentage needs no sign, as where it is compared."""
    if math_normalize.exceeds_complexity(stated, gold):
        return answer_key(stated)
    if math_forms.choice(gold) and (chosen := math_forms.choice(stated)):
        return chosen[0]
    value, _ = math_units.split(math_normalize.without_percent(stated) or stated)
    parsed = limited(lambda: math_expression.read(value), limit_s=MAX_CPU_S, otherwise=None)
    return canonical(stated, [] if parsed is None else [parsed])


def canonical(text: str, parsed: Sequence[Any]) -> str:
    """Returns a form that is alike for answers that are equal: of numbers whole ones exactly, others to six digits.

    Six are what the comparison holds against each other (`equality.RELATIVE_TOLERANCE`). Wrong answers that are equal
    in another way, as x(x+1) and x^2+x, count as two; right ones are all the row's own.

    Args:
      text: the answer, for where nothing could be parsed, or its form takes too long.
      parsed: what the library made of it.
    """
    written = answer_key("".join((text or next((str(p) for p in parsed), "")).split()))
    value = next((p for p in parsed if isinstance(p, sympy.Basic)), None)
    if value is None:
        return written
    form = limited(lambda: computed(lambda: _form(value)), limit_s=MAX_CPU_S, otherwise=None)
    return written if form is None else answer_key(form)


def _form(value: Any) -> str:
    if not (isinstance(value, sympy.Expr) and value.is_number and value.is_finite):
        return sympy.sstr(value)
    number = sympy.N(value, 30)  # thirty digits tell a whole number from a near one
    if number.is_Number and abs(number) < _MAX_WHOLE and abs(number - round(number)) < sympy.Float("1e-9"):
        return str(round(number))
    return sympy.sstr(sympy.N(number, 6), full_prec=False)
