"""Verifier `math`: mathematical equality by the math-verify library (LaTeX and plain expressions).

docs/math_equivalence.md lists deviations from the library, with reasons.
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
from actor.rewards.verifiers import math_expression, math_forms, math_normalize, math_units
from actor.rewards.verifiers.cpu_time import MAX_CPU_S, limited
from actor.rewards.verifiers.math_expression import computed
from actor.rewards.verifiers.math_extract import extract_answer, last_number, solution_answer
from bridge.rollout_types import Task

RELATIVE_TOLERANCE = 2e-6
"""Relative tolerance of a rounded number: six digits. The library rounds to six decimals, so small numbers become 0."""


def is_in_words(gold: str) -> bool:
    """Returns True if a reference answer may be stated in words: a choice, yes, a day of the week."""
    return bool(math_forms.choice(gold) or math_forms.words(gold))


def are_equal(gold: str, stated: str) -> bool:
    """Returns True if reference and stated answer are equal; both come from `math_normalize.normalize_latex`."""
    gold, stated = math_forms.with_one_ellipsis(gold), math_forms.with_one_ellipsis(stated)
    if math_normalize.exceeds_complexity(stated, gold):
        return stated == gold
    return bool(stated) and (_as_text(gold) == _as_text(stated) or _by_form(gold, stated))


def _by_form(gold: str, stated: str) -> bool:
    if letters := math_forms.sequence(gold):
        return letters == math_forms.sequence(stated)
    if letters := math_forms.choices(gold):
        return letters == math_forms.choices(stated) or _as_expressions(gold, stated)
    if chosen := math_forms.choice(gold):
        return _is_chosen(chosen, stated)
    if words := math_forms.words(gold):
        return words == math_forms.words(stated)
    time, stated_time = math_forms.time_of_day(gold), math_forms.time_of_day(stated)
    if time or (stated_time and (stated_time[3] or not math_forms.ratio(gold))):  # 10:30 is no ratio, but 6:10 is 3:5
        return (
            time is not None
            and stated_time is not None
            and (time[:3] == stated_time[:3] and (time[3] == stated_time[3] or not time[3] or not stated_time[3]))
        )
    if math_forms.is_date(gold) or math_forms.is_date(stated):
        return False  # only as text
    residue, stated_residue = math_forms.residue(gold), math_forms.residue(stated)
    if residue:
        return residue == stated_residue
    if stated_residue:
        return _as_expressions(gold, stated_residue[0])  # a residue in place of the requested number
    if any(bases := (math_forms.base(gold), math_forms.base(stated))):
        return bases[0] == bases[1] or [b[0] for b in bases if b and b[1] == 10] in ([gold], [stated])
    if r"\dots" in gold or r"\dots" in stated:
        return _as_lists(gold, stated, in_order=True)
    if any(ratios := (math_forms.ratio(gold), math_forms.ratio(stated))) and max(map(len, ratios)) > 2:
        return math_forms.match_all(*ratios, are_equal=_as_expressions, in_order=True)
    return _as_expressions(gold, stated) or _as_quantities(gold, stated) or _as_lists(gold, stated, in_order=False)


def _is_chosen(gold: tuple[str, str], stated: str) -> bool:
    letter, says = gold
    if other := math_forms.choice(stated):
        return other[0] == letter
    return bool(says) and not math_forms.choices(stated) and are_equal(math_normalize.normalize_latex(says), stated)


def _as_text(text: str) -> str:
    """Returns a text without white space that separates no words or numbers, and without braces around an index."""
    text = re.sub(r"([_^])\s*\{\s*([A-Za-z])\s*\}(?![A-Za-z])", r"\1\2", text)
    return re.sub(r"(?<!\w) | (?!\w)", "", " ".join(text.split()))


def _as_lists(gold: str, stated: str, *, in_order: bool) -> bool:
    """Returns True for lists with equal elements, unless the grammar reads both as expressions."""
    if math_expression.read(gold) is not None and math_expression.read(stated) is not None:
        return False
    bracket, inner = _unwrapped(gold)
    other, answer = _unwrapped(stated)
    golds, answers = math_expression.elements(inner), math_expression.elements(answer)
    if len(golds) < 2 or bracket != other:
        return False
    return math_forms.match_all(golds, answers, are_equal, in_order=in_order or bracket not in ("", r"\{"))


def _unwrapped(text: str) -> tuple[str, str]:
    """Returns the bracket that opens a list, empty for none, and the bracketed text."""
    for opening, closing in ((r"\{", r"\}"), ("(", ")"), ("[", "]")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and math_normalize.is_closed_within(inner):
            return opening, inner
    return "", text


def _as_quantities(gold: str, stated: str) -> bool:
    """Returns True if two numbers with units are equal; units count if both are known, percent signs do not."""
    (gold_value, gold_unit), (value, unit) = math_units.split(gold), math_units.split(stated)
    ratio = math_units.ratio(gold_unit, unit)
    if (gold_value, value) != (gold, stated):
        if ratio == 0:
            return False
        if ratio is not None and ratio != 1:
            return _as_expressions(rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({gold_value})", value)
        if _as_expressions(gold_value, value):
            return True
    gold_number, number = math_normalize.without_percent(gold_value), math_normalize.without_percent(value)
    if gold_number is None and number is None:
        return False
    return _as_expressions(gold_number or gold_value, number or value)


def _as_expressions(gold: str, stated: str) -> bool:
    if {math_normalize.brackets(gold), math_normalize.brackets(stated)} == {"(", r"\{"}:
        return False  # an ordered one and an unordered one
    gold, stated = math_expression.as_point(gold, stated), math_expression.as_point(stated, gold)
    names = math_expression.variables(gold), math_expression.variables(stated)
    if all(names) and names[0] != names[1]:
        return False  # x < 2 or x > 5 differs from y < 2 or y > 5
    gold, stated = math_expression.as_union(gold, stated), math_expression.as_union(stated, gold)
    if math_expression.is_equation(gold) != math_expression.is_equation(stated) and not any(names):
        gold, stated = _value(gold), _value(stated)
    wanted, got = math_expression.read(gold), math_expression.read(stated)
    return wanted is not None and got is not None and are_equal_objects(wanted, got)


def _value(text: str) -> str:
    """Returns the right side of an equation that names a value or is true; empty for others; else the text itself."""
    sides = math_expression.unnamed_sides(text)
    objects = [math_expression.read(side) for side in sides] if len(sides) > 1 else []
    are_same = all(one is not None and are_equal_objects(objects[-1], one) for one in objects)
    return sides[-1] if are_same else ""


def are_equal_objects(gold: Any, stated: Any) -> bool:
    """Returns True if two objects of the algebra system are equal, numbers to six digits."""
    if math_expression.computed(lambda: gold.doit() == stated.doit() == 0) is True:
        return True  # the library does not compute 4 - 4
    are_equal = math_expression.computed(lambda: math_expression.are_equal(gold, stated)) is True
    return are_equal and not math_expression.computed(lambda: _differ_as_numbers(gold, stated))


def _differ_as_numbers(gold: Any, stated: Any) -> bool:
    """Returns True if both are numbers that differ by more than the library's rounding."""
    numbers = [n for n in (gold, stated) if isinstance(n, sympy.Expr)]
    if len(numbers) < 2 or any(not n.is_number or not n.is_finite for n in numbers):
        return False
    # Twenty digits of the numbers give enough digits of their difference.
    wanted, got = (sympy.N(n, 20) for n in numbers)
    return bool(abs(wanted - got) > RELATIVE_TOLERANCE * abs(wanted))


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that its time limits are off

_MAX_WHOLE = 1e20
"""Bound below which whole numbers are compared in every digit."""


def score(response: Response, task: Task, context: Context) -> Score:
    """Returns 1 if the answer that the response states equals the task's, else 0.

    A truncated response is scored by its whole sentences (`math_extract.extract_answer`). The task's metadata may say
    where to search the answer: {"answer_in": "conclusion" (default), "text" or "number"} (`prompts.answer_in`).

    The library's own time limits are off, because they depend on the machine's load. CPU time is limited instead
    (`cpu_time.MAX_CPU_S`). Raises ValueError if the task's answer states nothing.
    """
    del context
    gold = _gold(task.answer)
    if not gold:
        raise ValueError(f"expected a mathematical expression as answer, got {task.answer!r}")
    is_cut = response.finish == "length"
    in_words = is_in_words(gold)
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
            # The question itself equals its answer: a policy rewarded for that would answer 23 + 48 with 23 + 48.
            return Score.of(0.0, answer=answer_key(stated))  # the calculation does not vote for its value
        is_right = limited(lambda: are_equal(gold, stated), limit_s=MAX_CPU_S, otherwise=None)
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
    """Returns the expression of a reference answer; for a whole solution, its stated answer."""
    text = solution_answer(answer) or answer
    return math_normalize.normalize_latex(text, has_e=not math_normalize.is_scientific(text))


def _anywhere(text: str) -> list[Any]:
    return computed(lambda: math_verify.parse(text, parsing_timeout=None)) or []  # pyright: ignore[reportArgumentType]


def _is_any(gold: str, found: list[Any]) -> bool:
    parsed = math_expression.read(gold)
    return parsed is not None and any(are_equal_objects(parsed, one) for one in found)


def _key(gold: str, stated: str) -> str:
    """Returns the form in which a stated answer votes; percent signs and units count as in the comparison."""
    if math_normalize.exceeds_complexity(stated, gold):
        return answer_key(stated)
    if math_forms.choice(gold) and (chosen := math_forms.choice(stated)):
        return chosen[0]
    value, unit = math_units.split(math_normalize.without_percent(stated) or stated)
    ratio = math_units.ratio(math_units.split(gold)[1], unit)
    if ratio and ratio != 1:  # the value in the reference answer's unit
        value = rf"\frac{{{ratio.denominator}}}{{{ratio.numerator}}} \cdot ({value})"
    parsed = limited(lambda: math_expression.read(value), limit_s=MAX_CPU_S, otherwise=None)
    key = canonical(stated, [] if parsed is None else [parsed])
    return answer_key(f"{key} {unit}") if ratio == 0 else key


def canonical(text: str, parsed: Sequence[Any]) -> str:
    """Returns a form that equal answers share: whole numbers exactly, others to six significant digits.

    Six digits match the comparison (`RELATIVE_TOLERANCE`). Wrong answers that are equal in another way, such as x(x+1)
    and x^2+x, count as two. Without parsed objects, or if their form takes too long, it is the text.
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
    number = sympy.N(value, 30)  # thirty digits distinguish a whole number from a near one
    if number.is_Number and abs(number) < _MAX_WHOLE:
        whole = round(number)
        # An expression that cancels out is not exactly 0, and a small number is not 0.
        if abs(number - whole) < sympy.Float("1e-9" if whole else "1e-30"):
            return str(whole)
    return sympy.sstr(sympy.N(number, 6), full_prec=False)
