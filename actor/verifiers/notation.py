r"""Notation that math-verify reads as something else, rewritten as what it reads right; text in, text out.

Each rule has pairs in `tests/actor/verifiers/math_pairs.jsonl` that are judged wrongly without it.
"""

import math
import re
import unicodedata
from collections.abc import Callable

_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"), "-")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_ROOT = re.compile(r"√\s*(?:(\d+|[A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;:!]|\\ |\u00a0|\u2009|\u202f|,\\!)\d{3})+(?![\d])")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])")
_MIXED = re.compile(r"\s*(-?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)\s*")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\\left)?[({]?\s*)(\d+(?:\.\d+)?)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)"
)
_EULER = re.compile(r"(?<![A-Za-z\\])e(?![A-Za-z])")
_NAMED = re.compile(r"([^=<>]*[^=<>\s:!])\s*=\s*([a-zA-Z])\s*")
_NUMBER = re.compile(r"[\s${}\\]*[-+]?\s*[\\$]*\d[\d,]*(?:\.\d*)?[\s$}.]*")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_DRESS = re.compile(
    r"\\(?:boxed|text(?:bf|rm|it)?|math(?:rm|bf)?|left|right)(?![a-zA-Z])|\\[,;:! ]|\\(?=[$%])"
    r"|\{,\}|[{}$~]|(?<=\d),(?=\d)"
)
_WORKED_OUT = re.compile(
    r"""\(?\s?[-+]?\s?
    (?:(?:\d+\s)?(?P<over>\d+)\s?/\s?(?P<under>\d+)|\d+(?:\.\d*)?|\.\d+)
    (?:\s?(?:\\times|\\cdot|[*×·])\s?10\s?(?:\^|\*\*)\s?\(?[-+]?\d+\)?)?
    \s?\)?\s?[%°]?\s?(?:[A-Za-z]+(?:\s[A-Za-z]+)*)?[\s.]*""",
    re.VERBOSE,
)
_CHOICE = re.compile(r"\W*(?:text(?:bf|rm|it)?|math(?:rm|bf))?\s*\{?\s*\(?\s*([A-J])\s*(?:\)|\}|\s*$)")
_PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*(?:\\text\s*\{)?\s*\bpercent\b\s*\}?)\s*$")


def plain(text: str, *, has_e: bool = False) -> str:
    r"""An expression with its odd notation rewritten: dashes, roots and fractions of Unicode, `1\,000`, `1.2e5`.

    `has_e`: the gold answer has, or may have, the number e in it: 3e-4 is 3e less 4 then; 1.2e5 is 120000 all the same.
    """
    text = text.translate(_DASHES)
    text = _RAISED.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(map(_ascii, text))
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = re.sub(r"\\text\s*\{\s*-\s*\}", "-", text)
    text = re.sub(r"\\underline\s*(?=\{)", "", text).replace(r"\varnothing", r"\emptyset")
    text = _GROUPED.sub(lambda m: re.sub(r"\D", "", m.group()), text)
    text = _EXPONENT.sub(lambda m: m[0] if has_e and "." not in m[1] else rf"{m[1]} \times 10^{{{m[2]}}}", text)
    if mixed := _MIXED.fullmatch(text):
        text = "{}{}\\frac{{{}}}{{{}}}".format(*mixed.groups())
    text = _DEGREES.sub(r"\1\\frac{\2 \\pi}{180}", text)
    if named := _NAMED.fullmatch(text):  # 5 = x
        text = f"{named[2]} = {named[1]}"
    return re.sub(r"(?<!\\)[.,;:]+\s*$", "", text.strip())


def names_e(text: str) -> bool:
    """Whether the number e is in an expression."""
    return bool(_EULER.search(text))


def without_percent(text: str) -> str | None:
    """What stands before a percent sign at the end; None if there is none."""
    stripped = _PERCENT.sub("", text)
    return stripped.strip() if stripped != text else None


def choice(text: str) -> str | None:
    r"""The letter that an answer to a multiple choice begins with: of `\textbf{(B)}\ 12` it is B."""
    found = _CHOICE.match(text)
    return found[1] if found else None


def is_number(text: str) -> bool:
    r"""Whether an expression is one number in digits, as 42, -1,200, \$3.50 or 12.0."""
    return _NUMBER.fullmatch(text) is not None


def is_worked_out(text: str) -> bool:
    r"""Whether an expression, or what follows its last equals sign, is a number that nobody has to compute.

    That is one number in digits, or a fraction in lowest terms; with a sign, a power of ten, a currency, a percent sign
    or words of a unit. All else is a calculation that was not done, however it is written: 23 + 48, 6 / 2,
    \sqrt{2304}, 2^{10}.
    """
    last = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text.rpartition("=")[2])
    found = _WORKED_OUT.fullmatch(" ".join(_DRESS.sub("", last).split()))
    if found is None:
        return False
    return found["under"] is None or (
        int(found["under"]) > 1 and math.gcd(int(found["over"]), int(found["under"])) == 1
    )


def is_choice(text: str) -> bool:
    """Whether a gold answer is one letter of a multiple choice."""
    return bool(re.fullmatch(r"(?:\\(?:text(?:bf|rm)?|mathrm)\s*\{)?\s*\(?\s*[A-J]\s*\)?\s*\}?", text.strip()))


def brackets(text: str) -> str:
    r"""What holds the whole of an expression: "(" (a tuple), "\{" (a set), or empty: anything else."""
    bare = re.sub(r"\\(?:left|right)\b\s*|[\s$]", "", text)
    shapes: dict[str, Callable[[str], bool]] = {
        "(": lambda t: t.startswith("(") and t.endswith(")"),
        r"\{": lambda t: t.startswith(r"\{") and t.endswith(r"\}"),
    }
    shape = next((name for name, holds in shapes.items() if holds(bare)), "")
    return shape if shape and _is_one_list(bare[len(shape) : -len(shape)]) else ""


def _is_one_list(inner: str) -> bool:
    """Whether brackets around it hold a list: a comma at the top, and no bracket closed that was not opened there."""
    depth, has_comma = 0, False
    for c in inner:
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            return False
        has_comma = has_comma or (c == "," and depth == 0)
    return has_comma


def _ascii(c: str) -> str:
    """A character as a parser knows it: a full-width one, a fraction."""
    kind, _, points = unicodedata.decomposition(c).partition(" ")
    if kind == "<wide>":
        return chr(int(points, 16))
    if kind == "<fraction>":
        over, under = "".join(chr(int(p, 16)) for p in points.split()).split("\u2044")
        return rf"\frac{{{over}}}{{{under}}}" if under else c
    return c
