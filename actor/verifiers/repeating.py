r"""Repeating decimals as fractions in lowest terms: `0.1\overline{6}`, `0.\dot{3}`, `0.(3)`, `0.333\ldots`."""

import re
from fractions import Fraction

_MAX_DIGITS = 40
_BARRED = re.compile(
    r"(?<![\d.])(\d{1,20})\.(\d{0,20})(?:\\(?:overline|bar)\s*(?:\{\s*(\d{1,20})\s*\}|(\d))"
    r"|\(\s*(\d{1,20})\s*\))(?!\s*[\d.(])"
)
_DOTTED = re.compile(
    r"(?<![\d.])(\d{1,20})\.(\d{0,20})\\dot\s*(?:\{\s*(\d)\s*\}|(\d))"
    r"(?:(\d{0,20})\\dot\s*(?:\{\s*(\d)\s*\}|(\d)))?(?![\d.])"
)
_GOING_ON = re.compile(r"(?<![\d.])(\d{1,20})\.(\d{3,40})\s*(?:\.\.\.|\\l?dots(?![A-Za-z])|\u2026)")


def as_fractions(text: str) -> str:
    """Returns a text with its repeating decimals as fractions; digits that only go on have to repeat visibly."""
    text = _BARRED.sub(lambda m: _fraction(m[1], m[2], m[3] or m[4] or m[5]), text)
    text = _DOTTED.sub(lambda m: _fraction(m[1], m[2], (m[3] or m[4]) + (m[5] or "") + (m[6] or m[7] or "")), text)
    return _GOING_ON.sub(_going_on, text)


def _going_on(decimal: re.Match[str]) -> str:
    digits = decimal[2]
    for length in range(1, len(digits) // 2 + 1):
        period, times = digits[-length:], 3 if length == 1 else 2
        if digits.endswith(period * times):
            return _fraction(decimal[1], digits.removesuffix(period * times), period)
    return decimal[0]


def _fraction(whole: str, once: str, period: str) -> str:
    if len(whole + once + period) > _MAX_DIGITS:
        return f"{whole}.{once}\\overline{{{period}}}"
    value = Fraction(int(whole + once + period) - int(whole + once), 10 ** len(once) * (10 ** len(period) - 1))
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
