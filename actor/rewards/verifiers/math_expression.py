r"""Answers as sympy objects, parsed completely or not at all.

The library's own `parse` searches a text's last readable expression: of `1, 2, \ldots, n` it compares the last number.
Here its grammar gets the whole text, and input that it would drop, add up or misread is rejected. Unparsed answers are
compared as text.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import BooleanAtom

_NORMAL = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_UNREADABLE = re.compile(
    r"""['"?]|\.\.\.|\\dots          # the grammar drops a prime; an ellipsis stands for what is not written
    |\d\s+[\d.]|%\s*%              # 5 6 would be 11
    |\d\}?\s*_                       # a base
    |!\s*!|\\p?mod|\\bmod|\\equiv|\\(?:lor|vee|land|wedge)(?![A-Za-z])  # not what the grammar makes of them
    |\\text\s*\{|(?<![\\A-Za-z])[A-Za-z]{4,}  # words, which it takes for products of their letters
    |\\\\(?![A-Za-z]{2})                # lines below each other
    |(?:(?<![A-Za-z])[A-DF-Za-df-z]|\)|\\end|\})\s*\^\s*(?:\{\s*)?(?:T(?![A-Za-z])|\\top|\\intercal)  # a transpose
    |[,;]\s*$|^\s*[,;]""",
    re.VERBOSE,
)
_NAMES = re.compile(
    r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|infty|pi|gcd)(?![A-Za-z])"
)
_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)")
_NAME = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_ENVIRONMENT = re.compile(r"\\(?:begin|end|operatorname)\s*\{[A-Za-z]*\}")
_ROWS = re.compile(r"\\begin\s*\{[A-Za-z]+\}(?:(?!\\begin).)*?\\end\s*\{[A-Za-z]+\}", re.DOTALL)
_SUBSCRIPT = re.compile(r"(\\log\s*_)\s*(\w)(?=[\s(])")
_PRODUCT = re.compile(r"(?<=[\d)])\s*\((?=[^()]*[\d)])")
_EQUATION = re.compile(r"(?<![\\<>!:])=")
_NAMED_VALUE = re.compile(
    r"""\s*(?:
    (?:(?:\\(?:angle|triangle|overline|vec|hat|bar)\s*)?\{?\s*(?:[A-Za-z]|[A-Z]{2,4}|\\(?!frac|sqrt)[A-Za-z]+)\s*\}?
      |\\text\s*\{\s*[A-Za-z][A-Za-z\s]*\})
    (?:\s*_\s*(?:\w|\{(?:[^{}]|\\text\s*\{[^{}]*\})*\}))?
    (?:\s*(?:\^\s*\{?\s*-1\s*\}?\s*)?\((?:[\w\s,.|=]|\\[A-Za-z]+)+\))?
    |[A-Z]\s*\^\s*\{?\s*-1\s*\}?
    |[a-wA-W](?:\s*\+\s*[a-wA-W])+
    |\[\s*[A-Z]{3,5}\s*\]
    |\|\s*[A-Z]{2}\s*\|
    |\\frac\s*\{\s*d\s*\w?\s*\}\s*\{\s*d\s*\w\s*\}
    |\(\s*[A-Za-z](?:_\w)?(?:\s*,\s*[A-Za-z](?:_\w)?)+\s*\)
    )\s*""",
    re.VERBOSE,
)
"""Left side of an equation that names a value: x, a_n, AB, Area, f(x), P(X = 1), A^{-1}, m + n, [ABC], (a, b). A sum of
x, y or z names none: x + y = 5 is a line."""
_ASSIGNED = re.compile(r"\s*([A-Za-z])\s*=([^=]+)")
_INTERVAL = re.compile(r"\s*(?:([A-Za-z])\s*\\in(?![A-Za-z])\s*)?([(\[][^()\[\]]+,[^()\[\]]+[)\]])\s*")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_OR_AND = r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(or|and)\s*,?\s*\}|(?<![A-Za-z\\])(or|and)(?![A-Za-z])%s)\s*"
_WORD_JOINT = re.compile(_OR_AND % "")
_JOINT = re.compile(_OR_AND % r"|\\(lor|vee|land|wedge)(?![A-Za-z])")
_EITHER_SIGN = re.compile(r"\\(pm|mp)(?![A-Za-z])|\u00b1")
_SET = re.compile(r"\s*\\\{(.*)\\\}\s*", re.DOTALL)
_RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|ne|neq|lt|gt|leqslant|geqslant)(?![A-Za-z])")
_OR, _AND, _COMMA = "or", "and", ","


def elements(text: str) -> list[str]:
    """Returns the top-level parts of a list: between commas, semicolons, "and" and "or"; one part if no list."""
    return [part for part, _ in _parts(text, _WORD_JOINT)]


def as_union(text: str, other: str) -> str:
    r"""Returns intervals joined by "or" as a union, if the other answer is a set; (1,2) or (3,4) may be points."""
    parts = _parts(text, _WORD_JOINT)
    found = [_INTERVAL.fullmatch(part) for part, _ in parts]
    if len(parts) < 2 or parts[-1][1] != _OR or not (_UNION.search(other) or _RELATION.search(other)):
        return text
    if not all(found) or len({m[1] for m in found if m}) > 1:
        return text
    name = rf"{found[0][1]} \in " if found[0] and found[0][1] else ""
    return name + r" \cup ".join(m[2] for m in found if m)


def as_point(text: str, other: str) -> str:
    """Returns equations of variables as a point, in the order of their names, if the other answer is a point."""
    found = [_ASSIGNED.fullmatch(part) for part in elements(text)]
    values = {m[1]: m[2].strip() for m in found if m}
    if len(values) < max(2, len(found)) or not (other.startswith("(") and other.endswith(")")):
        return text
    return f"({', '.join(values[name] for name in sorted(values))})"


def is_equation(text: str) -> bool:
    """Returns True for one equation, not a list of them."""
    return len(_sides(text)) > 1 and len(elements(text)) == 1


def unnamed_sides(text: str) -> list[str]:
    """Returns the sides of an equation without a leading name; for all else, a list of the text itself."""
    if not is_equation(text):
        return [text]
    sides = _sides(text)
    return sides[1:] if _NAMED_VALUE.fullmatch(sides[0]) else sides


def _sides(text: str) -> list[str]:
    """Returns the texts between equals signs outside brackets."""
    sides, start = [], 0
    for sign in _EQUATION.finditer(text):
        before = text[: sign.start()]
        if sum(map(before.count, "([{")) == sum(map(before.count, ")]}")):
            sides.append(text[start : sign.start()])
            start = sign.end()
    return [*sides, text[start:]]


@functools.lru_cache(maxsize=64)
def read(text: str) -> Any:
    """Returns the sympy object of a whole text, or None; relations joined by words or commas are one set."""
    return computed(lambda: _read(text))


def _read(text: str) -> Any:
    if _RELATION.search(text) and len(parts := _parts(text, _JOINT)) > 1:
        return _joined_relations(parts)
    if _EITHER_SIGN.search(text):
        return _with_either_sign(text)
    return _parsed(_WORD_JOINT.sub(", ", text))


def variables(text: str) -> frozenset[str]:
    """Returns the one-letter names in a text of relations; empty without a relation."""
    return frozenset(_NAME.findall(text)) if _RELATION.search(text) else frozenset()


def _with_either_sign(text: str) -> Any:
    r"""Returns the set of values of a text with `\pm`, two for each part of a list that has it, or None."""
    text = _EQUATION.split(text)[-1]
    listed = _SET.fullmatch(text)
    values: list[Any] = []
    for part in elements(listed[1] if listed else text):
        signs = ("+-", "-+") if _EITHER_SIGN.search(part) else ("",)
        values += [_parsed(_EITHER_SIGN.sub(lambda m, o=one: o[m[1] == "mp"], part)) for one in signs]
    if not _EITHER_SIGN.search(text) or any(not isinstance(v, sympy.Expr) for v in values):
        return None
    return FiniteSet(*values)


def _parsed(text: str) -> Any:
    text = _NAMES.sub(r"\\\1 ", _ROOT.sub(r"\\sqrt{\1}", text))
    text = _SUBSCRIPT.sub(r"\1{\2}", text)
    if not text.strip() or _UNREADABLE.search(_ENVIRONMENT.sub("", _ROWS.sub(" M ", text))):
        return None
    text = _PRODUCT.sub(r" \\cdot (", text)
    # An equation whose left side is a name and no expression states its right side.
    sides = unnamed_sides(text)
    readings = [text] if len(sides) > 1 or "," in text else dict.fromkeys([text, *sides])
    for one in readings:
        normal = normalize_latex(one, _NORMAL)
        value = computed(
            lambda normal=normal: latex2sympy(normal, is_real=True, convert_degrees=False, normalization_config=None)
        )
        if value is not None and (found := _with_i(value)) is not None:
            return found
    return None


def _with_i(value: Any) -> Any:
    """Returns an object in which a free variable i is the imaginary unit, or None if that decides an equation.

    An index of a sum is not free. All names are real, so z = 1 + 2i and z = 1 - 2i would both be false.
    """
    names = {s: sympy.I for s in getattr(value, "free_symbols", ()) if s.name == "i"}
    found = computed(lambda: value.xreplace(names)) if names else value
    parts = found.args if isinstance(found, FiniteSet) else (found,)
    return None if any(isinstance(one, BooleanAtom) for one in parts) else found


def _joined_relations(parts: list[tuple[str, str]]) -> Any:
    """Returns the set of numbers that satisfy relations of one variable, or None for other relations."""
    relations = [_parsed(part) for part, _ in parts]
    if not all(isinstance(r, sympy.core.relational.Relational | And) for r in relations):
        return None
    names = {str(s) for r in relations for s in r.free_symbols}
    if all(isinstance(r, sympy.Eq) for r in relations) or len(names) != 1:
        return None
    sets = [as_set(r) for r in relations]
    if any(s is None for s in sets):
        return None
    total = sets[0]
    for (_, word), one in zip(parts[1:], sets[1:], strict=True):
        meet = sympy.Intersection(total, one)
        # A comma between bounds that exclude each other separates alternatives.
        is_or = word == _OR or (word == _COMMA and meet.is_empty)
        total = sympy.Union(total, one) if is_or else meet
    return total


def as_set(relation: Any) -> Any:
    """Returns the real numbers that satisfy a relation of one variable, or None if it has none or several."""
    if isinstance(relation, And):
        relation = sympy.And(*relation.args)
    if len(relation.free_symbols) != 1:
        return None
    return computed(lambda: relation.as_set())


def computed(function: Callable[[], Any]) -> Any:
    """Returns a function's result, or None if the algebra system fails on odd input."""
    try:
        return function()
    except Exception:  # It raises anything: TypeError, AttributeError, RecursionError, exceptions of its parser.
        return None


def are_equal(gold: Any, stated: Any) -> bool:
    """Returns True if two objects are equal by the library's rules; an inequality equals its interval, either way."""
    for one, other in ((gold, stated), (stated, gold)):
        if _is_range(one) and _is_of_points(other, are_named=isinstance(one, sympy.Interval)):
            return False  # the library takes an open interval for its two ends
        if isinstance(one, sympy.Union | sympy.Intersection) and not isinstance(other, sympy.Set):
            other_set = as_set(other) if isinstance(other, sympy.core.relational.Relational | And) else None
            if other_set is not None:
                return computed(lambda a=one, b=other_set: a == b or sympy.SymmetricDifference(a, b).is_empty) is True
    if isinstance(gold, sympy.Ne) and isinstance(stated, sympy.Ne):
        return gold.free_symbols == stated.free_symbols and as_set(gold) is not None and as_set(gold) == as_set(stated)
    if isinstance(gold, sympy.Eq) and isinstance(stated, sympy.Eq):
        if gold.lhs == stated.lhs and isinstance(gold.lhs, sympy.Symbol | sympy.Derivative | AppliedUndef):
            gold, stated = gold.rhs, stated.rhs
        elif computed(lambda: sympy.solve(gold, gold.free_symbols)) == []:
            # The library compares solutions, so it takes all equations without a real one for equal.
            return _are_multiples(gold, stated)
    return math_verify.verify([gold], [stated], timeout_seconds=None, allow_set_relation_comp=True)


def _is_range(one: Any) -> bool:
    """Returns True for an interval, or an inequality that is not solved by single points."""
    if isinstance(one, sympy.Eq):
        return isinstance(one.lhs, sympy.Symbol) and isinstance(one.rhs, sympy.Interval)  # x in an interval
    if isinstance(one, And | sympy.core.relational.Relational) and not isinstance(one, sympy.Ne):
        return not isinstance(as_set(one), sympy.FiniteSet)
    return isinstance(one, sympy.Interval)


def _is_of_points(one: Any, *, are_named: bool) -> bool:
    """Returns True for a list of values; with `are_named` only for those of one variable, as in `x = 1 or x = 2`."""
    if isinstance(one, sympy.Eq):
        return isinstance(one.rhs, sympy.FiniteSet)
    if not isinstance(one, sympy.FiniteSet):
        return False
    are_equations = all(isinstance(element, sympy.Eq) for element in one.args)
    return not are_named or (are_equations and len({element.args[0] for element in one.args}) == 1)


def _are_multiples(gold: Any, stated: Any) -> bool:
    """Returns True if one equation is the other times a number other than 0."""
    ratio = computed(lambda: sympy.simplify((gold.lhs - gold.rhs) / (stated.lhs - stated.rhs)))
    return isinstance(ratio, sympy.Expr) and ratio.is_number and ratio.is_nonzero is True


def _parts(text: str, joints: re.Pattern[str]) -> list[tuple[str, str]]:
    """Returns the parts of a list, each with the preceding word or comma."""
    found: list[tuple[str, str]] = []
    depth, start, joint, at = 0, 0, "", 0
    while at < len(text):
        c = text[at]
        word = joints.match(text, at) if depth == 0 and c in " ,oa\\" else None
        if word or (depth == 0 and c in ",;" and not _is_in_number(text, at)):
            found.append((text[start:at].strip(), joint))
            name = next((g for g in word.groups() if g), "") if word else ""
            joint = _OR if name in ("or", "lor", "vee") else _AND if name else _COMMA
            at = start = word.end() if word else at + 1
            continue
        if c == "\\":
            depth += text.startswith("\\begin", at) - text.startswith("\\end", at)
            at += 2 if text[at + 1 : at + 2] in ",;:! \\" else 1
            continue
        depth += (c in "([{") - (c in ")]}")
        at += 1
    found.append((text[start:].strip(), joint))
    return [one for one in found if one[0]]


def _is_in_number(text: str, at: int) -> bool:
    """Returns True if a comma separates thousands: three digits follow it, and at most three precede it."""
    return text[at] == "," and bool(
        re.match(r",\d{3}(?!\d)", text[at : at + 5])
        and re.search(r"(?<!\d)\d{1,3}(?:,\d{3})*$", text[max(0, at - 40) : at])
    )
