r"""What is not handed to a computer algebra system, as it would compute for ever: found by its text alone.

No bound finds all of it; what is left runs into the deadline of its worker (`pool.py`). These are cheap.
"""

import math
import re

MAX_CHARS = 2000
"""Of an answer, or four times the gold one's where that is more."""
MAX_DEPTH = 60
"""Of brackets within brackets."""
MAX_FRACTIONS = 20
"""Divisions of an answer, or twice the gold one's where that is more: the algebra system nests them."""
MAX_EXPONENT = 10_000
"""A larger power of numbers, or of a sum, is not computed; nor is the factorial of a larger number."""
_EXPONENT = re.compile(r"\^\s*\{?\s*[-+]?\s*(\d+)")
_TOWER = re.compile(r"\^\s*\{\s*(\d+)\s*\^\s*\{?\s*(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*!|[)}\]!]\s*!")
_LOOPS = re.compile(r"\\(?:sum|prod|d?binom|tbinom|bigcup|bigcap)(?![A-Za-z])")
_POWER = re.compile(r"(\d+)\s*\^\s*\{?\s*(\d+)")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_SIGNS = re.compile(r"(?:[-+]\s*){50}")


def is_too_long(answer: str, gold: str) -> bool:
    """Returns True if an answer is longer than answers are; asked before any other rule reads it."""
    return len(answer) > max(MAX_CHARS, 4 * len(gold))


def is_too_large(answer: str, gold: str) -> bool:
    """Whether an answer is longer, deeper or further from a number that can be written down than answers are."""
    return (
        is_too_long(answer, gold)
        or bool(_SIGNS.search(answer))
        or _depths(answer) > MAX_DEPTH
        or _num_fractions(answer) > max(MAX_FRACTIONS, 2 * _num_fractions(gold))
        or _has_large_power(answer)
        or _has_large_factorial(answer)
        or (bool(_LOOPS.search(answer)) and _largest_number(answer) > MAX_EXPONENT)
    )


def _num_fractions(text: str) -> int:
    return text.count("/") + text.count("frac")


def _depths(text: str) -> int:
    depth = deepest = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _has_large_power(text: str) -> bool:
    if any(_is_above(n) for n in _EXPONENT.findall(text)):
        return True
    if any(_power(a, b) > MAX_EXPONENT for a, b in _TOWER.findall(text)):
        return True
    return re.search(r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^\s*\{", text) is not None  # three floors of exponents


def _has_large_factorial(text: str) -> bool:
    has_variable = bool(_VARIABLE.search(text))
    return any(_is_above(m[1]) if m[1] else not has_variable for m in _FACTORIAL.finditer(text))


def _largest_number(text: str) -> float:
    numbers = (float(n) if len(n) < 300 else math.inf for n in re.findall(r"\d+", text))
    return max([*numbers, *(_power(a, b) for a, b in _POWER.findall(text))], default=0.0)


def _is_above(digits: str) -> bool:
    return len(digits.lstrip("0")) > 5 or int(digits) > MAX_EXPONENT


def _power(base: str, exponent: str) -> float:
    """As a float: infinite where it is beyond one."""
    if len(base) > 300 or len(exponent) > 300:
        return math.inf
    try:
        return float(base) ** float(exponent)
    except OverflowError:
        return math.inf
