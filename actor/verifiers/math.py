"""Mathematical equality, by the math-verify library (parses LaTeX and plain expressions).

Where we decide otherwise than the library, and why: docs/math_answers.md.
"""

import functools
import json
import logging
from collections.abc import Sequence
from typing import Any

import math_verify
import sympy

from actor.verifiers import bounds, notation
from actor.verifiers.conclusion import conclusion, last_number
from actor.verifiers.judged import Context, Response, Score, answer_key
from bridge.types import Task

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns, once a call, that its time limits are off

RELATIVE_TOLERANCE = 2e-6
"""Of a rounded number: six digits that are right. The library rounds to six decimals, by which small numbers are 0."""

_MAX_WHOLE = 1e20
"""Whole numbers below it are told apart in every digit."""


def score(response: Response, task: Task, context: Context) -> Score:
    """1 if the answer that the response states equals the task's, else 0.

    A response that was cut off is judged by its whole sentences (`conclusion`).

    The task's metadata says where the answer is looked for: {"answer_in": "conclusion", "text" or "number"}, the first
    if it says nothing (`prompts.answer_in`).

    The library's own time limits are off: they would turn a timeout into a wrong answer. The pool's holds.

    Raises:
      ValueError: the task's answer can't be parsed.
    """
    del context
    gold = notation.plain(task.answer, has_e=True)
    parsed = _parse(_marked(gold))
    if not parsed:
        raise ValueError(f"the answer {task.answer!r} is no mathematical expression")
    is_cut = response.finish == "length"
    stated = conclusion(response.answer, is_cut=is_cut)
    answer_in = json.loads(task.metadata).get("answer_in")
    wants_number = answer_in == "number" and notation.is_number(conclusion(gold) or gold)
    if stated is None and wants_number:
        stated = last_number(response.answer[-bounds.MAX_CHARS :], is_cut=is_cut)
    if stated is not None:
        stated = notation.plain(stated, has_e=notation.names_e(gold))
        if wants_number and not notation.is_worked_out(stated):
            # The question itself equals its answer: a policy that is paid for it says 23 + 48 where that was asked.
            return Score.of(0.0, answer=answer_key(stated))  # no vote for what it would come to
        is_right = _are_equal(gold, parsed, stated)
        return Score.of(float(is_right), answer=_key(gold, gold if is_right else stated))  # right ones vote as one
    if answer_in == "text":
        found = _parse(response.answer[-bounds.MAX_CHARS :])
        is_right = _verify(parsed, found)
        return Score.of(float(is_right), answer=_key(gold, gold) if is_right else canonical("", found))
    return Score.of(0.0, answer="")


def _key(gold: str, stated: str) -> str:
    """What a stated answer votes for; a percentage needs no sign, as where it is compared."""
    if bounds.is_too_large(stated, gold):
        return answer_key(stated)
    if notation.is_choice(gold) and (chosen := notation.choice(stated)):
        return chosen
    bare = notation.without_percent(stated) or stated
    return canonical(bare, _parse(_boxed(bare)))


def canonical(text: str, parsed: Sequence[Any]) -> str:
    """A form that is alike for answers that are equal: of numbers whole ones exactly, others to six digits.

    Six are what the comparison holds against each other (`RELATIVE_TOLERANCE`). Wrong answers that are equal in another
    way, as x(x+1) and x^2+x, count as two; right ones are all the row's own.

    Args:
      text: the answer, for where nothing could be parsed.
      parsed: what the library made of it.
    """
    value = next((p for p in parsed if isinstance(p, sympy.Basic)), None)
    if value is None:
        return answer_key("".join((text or next((str(p) for p in parsed), "")).split()))
    if not (isinstance(value, sympy.Expr) and value.is_number and value.is_finite):
        return answer_key(sympy.sstr(value))
    number = sympy.N(value, 30)  # thirty digits tell a whole number from a near one
    if number.is_real and abs(number) < _MAX_WHOLE and abs(number - round(number)) < sympy.Float("1e-9"):
        return str(round(number))
    return answer_key(sympy.sstr(sympy.N(number, 6), full_prec=False))


def _are_equal(gold: str, parsed: list[Any], stated: str) -> bool:
    """Whether a gold answer, as text and as parsed, and a stated one are the same; a percentage needs no sign."""
    if bounds.is_too_large(stated, gold):
        return stated == gold
    if notation.is_choice(gold) and (chosen := notation.choice(stated)):
        return chosen == notation.choice(gold)
    if {notation.brackets(gold), notation.brackets(stated)} == {"(", r"\{"}:
        return False  # what has an order, and what has none
    if _verify(parsed, _parse(_boxed(stated))):
        return True
    gold_number, number = notation.without_percent(gold), notation.without_percent(stated)
    if (gold_number is None) == (number is None):
        return False
    return _verify(_parse(_marked(gold_number or gold)), _parse(_boxed(number or stated)))


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    # An inequality states an interval, whichever of the two is the gold answer.
    is_equal = math_verify.verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)
    return is_equal and not _differ_as_numbers(gold, answer)


def _differ_as_numbers(gold: list[Any], answer: list[Any]) -> bool:
    """Whether both are one number each, and another one but for what the library rounds away."""
    numbers = [next((e for e in side if isinstance(e, sympy.Expr)), None) for side in (gold, answer)]
    if any(n is None or not n.is_number or not n.is_finite for n in numbers):
        return False
    # Twenty digits: of a difference they are as many as of the numbers.
    wanted, got = (sympy.N(n, 20) for n in numbers)
    return bool(abs(wanted - got) > RELATIVE_TOLERANCE * abs(wanted))


@functools.lru_cache(maxsize=32)
def _parse(text: str) -> list[Any]:
    """Kept for a moment: one text is compared, and then made canonical. Nobody changes the list."""
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _boxed(expression: str) -> str:
    return f"\\boxed{{{expression}}}"


def _marked(answer: str) -> str:
    # Bare LaTeX is recognised only inside an environment.
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
