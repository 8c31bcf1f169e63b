r"""Notation that math-verify reads as something else, rewritten as what it reads right; text in, text out.

Each rule has pairs in `tests/actor/verifiers/math_pairs.jsonl` that are judged wrongly without it.
"""

import math
import re
import unicodedata
from collections.abc import Callable

from actor.verifiers import repeating, spoken

_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"), "-")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_ROOT = re.compile(r"√\s*(?:(\d+|[A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,;:!]|\\ |\u00a0|\u2009|\u202f|,\\!)\d{3})+(?![\d])")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])")
_SCIENTIFIC = re.compile(r"[\s$]*[-+]?(?:\d*\.?\d+e\d+|\d*\.?\d+e[-+]0\d+|1(?:\.0*)?e[-+]\d+)[\s$]*", re.IGNORECASE)
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
_MARKS = re.compile(
    r"^\s*(?:\\approx(?![A-Za-z])|\u2248)|(?<!\\)\$|(?<!\\)\\[()\[\]]|\\!|\\displaystyle(?![A-Za-z])|\\boxed(?=\s*\{)|\\fbox(?=\s*\{)"
)
_COLORS = re.compile(r"\\(?:text|f)?color(?:box)?\s*(?:\[[^\[\]]{0,20}\])?\s*\{[^{}]{0,40}\}")
_SIZES = re.compile(
    r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|sf|tt|bfseries|itshape|boldmath"
    r"|quad|qquad|limits|nolimits)(?![A-Za-z])|\\(?:h|v)space\*?\s*\{[^{}]{0,20}\}|\\h?phantom\s*\{[^{}]{0,20}\}"
)
_BIG = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])(?:\.(?!\d))?")
_BRACES = re.compile(r"\\([lr])brace(?![A-Za-z])")
_MATRIX = re.compile(r"([(\[])\s*\\begin\{matrix\}(.*?)\\end\{matrix\}\s*[)\]]", re.DOTALL)
_FONT_NAMES = (
    r"\\(?:boldsymbol|bm|pmb|math(?:bf|rm|it|sf|tt|normal)|text(?:bf|rm|it|sf|tt|normal|up)?|emph|mbox|underline)"
)
_FONTS = re.compile(_FONT_NAMES + r"\{\s?([^{}]*)\}")
_FONT = re.compile(r"(?!\\text(?![A-Za-z]))" + _FONT_NAMES + r"(?=\s*\{)")
_LONE = re.compile(r"(?<![\w}^_\]\\])\{\s*(\d[\d.]*)\s*\}")
_UNITS_OF_ONE_LETTER = tuple("mghsl")
_FUNCTIONS = ("lcm", "gcd", "ln", "log", "sin", "cos", "tan", "cot", "sec", "csc", "exp", "max", "min")
_CHOOSE = re.compile(r"\{([^{}]{1,40})\\choose(?![A-Za-z])([^{}]{1,40})\}")
_LG = re.compile(r"\\lg(?![A-Za-z])\s*")
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|~|\s+")
_SAME = {
    r"\varnothing": r"\emptyset", r"\colon": ":", r"\degree": r"^\circ", "\u00b0": r"^\circ", "**": "^",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u221e": r"\infty ", "\u222a": r"\cup ",
    "\u2208": r"\in ", "\u2229": r"\cap ", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", "{:}": ":",
    "{,}": ",", r"\%": "%",
}  # fmt: skip
_PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*(?:\\text\s*\{)?\s*\bpercent\b\s*\}?)\s*$")


def plain(text: str, *, has_e: bool = False) -> str:
    r"""Returns an expression without dress and with odd notation rewritten: `1\,000`, `1.2e5`, `0.\overline{3}`.

    `has_e`: the gold answer has, or may have, the number e in it: 3e-4 is 3e less 4 then; 1.2e5 is 120000 all the same.
    """
    text = _undressed(" ".join(text.translate(_DASHES).split()))
    text = _RAISED.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(map(_ascii, text))
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = _GROUPED.sub(lambda m: re.sub(r"\D", "", m.group()), text)
    text = repeating.as_fractions(_SPACE.sub(" ", text))
    text = _EXPONENT.sub(lambda m: m[0] if has_e and "." not in m[1] else rf"{m[1]} \times 10^{{{m[2]}}}", text)
    if mixed := _MIXED.fullmatch(text):
        text = "{}{}\\frac{{{}}}{{{}}}".format(*mixed.groups())
    text = _DEGREES.sub(r"\1\\frac{\2 \\pi}{180}", text)
    if named := _NAMED.fullmatch(text):  # 5 = x
        text = f"{named[2]} = {named[1]}"
    return spoken.in_digits(re.sub(r"(?<!\\)[.,;:]+\s*$", "", text.strip()))


def _undressed(text: str) -> str:
    r"""Returns a text without colors, fonts, sizes and marks of mathematics; words stay marked, all by `\text`."""
    if text.startswith("**") and text.endswith("**"):
        text = text.strip("* ")
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        text = re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text, count=1)  # $5 is money, not a mark
    text = _MARKS.sub("", text)
    text = _COLORS.sub(" ", text)
    text = _SIZES.sub(" ", text)
    text = _BRACES.sub(lambda m: r"\{" if m[1] == "l" else r"\}", _BIG.sub("", text))
    text = _MATRIX.sub(r"\\begin{pmatrix}\2\\end{pmatrix}", text)
    text = re.sub(r"\\\\\s*\[[^\[\]]{0,12}\]", r"\\\\", text)  # a row's distance to the next one
    for _ in range(4):
        bare = _FONTS.sub(_as_text, text)
        if bare == text:
            break
        text = bare
    text = _LONE.sub(r" \1 ", _FONT.sub("", text))
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    for name, plainer in _SAME.items():
        text = text.replace(name, plainer)
    text = re.sub(r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty", text)
    text = _LG.sub(r"\\log_{10} ", text)
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and _is_one_group(text):
        text = text[1:-1].strip()
    return text


def _as_text(font: re.Match[str]) -> str:
    r"""Returns words as `\text{...}`, and all else as it is."""
    inner = font[1].replace("~", " ")
    if inner.strip() in _FUNCTIONS:
        return rf"\operatorname{{{inner.strip()}}}" if inner.strip() == "lcm" else rf"\{inner.strip()} "
    if inner.strip() in _UNITS_OF_ONE_LETTER and font.start() and not font.string[font.start() - 1].isalpha():
        return rf"\text {{{inner}}}"
    if re.search(r"[^\W\d_]{2}|^\s*[A-Z]\s*$", inner) and not re.search(r"\\|[\d^=+*]", inner):
        return rf"\text {{{inner}}}"  # the space tells it from one that is still to be read
    is_text = (
        re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", inner))
        and not re.search(r"\d", inner)
        and font[0].startswith((r"\text", r"\mbox"))
    )
    return rf"\text {{{inner}}}" if is_text else f" {inner}"


def _is_one_group(text: str) -> bool:
    """Returns True if the brace that opens a text is closed by its last one."""
    depth = 0
    for at, c in enumerate(text):
        if at and text[at - 1] == "\\":
            continue
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return at == len(text) - 1
    return False


def names_e(text: str) -> bool:
    """Whether the number e is in an expression."""
    return bool(_EULER.search(text))


def is_scientific(text: str) -> bool:
    """Returns True if a whole text is a number such as 1e6, -1e-5 or 3e-06; 3e-4 may be 3e less 4."""
    return _SCIENTIFIC.fullmatch(text.translate(_DASHES)) is not None


def without_percent(text: str) -> str | None:
    """What stands before a percent sign at the end; None if there is none."""
    stripped = _PERCENT.sub("", text)
    return stripped.strip() if stripped != text else None


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


def brackets(text: str) -> str:
    r"""What holds the whole of an expression: "(" (a tuple), "\{" (a set), or empty: anything else."""
    bare = re.sub(r"\\(?:left|right)\b\s*|[\s$]", "", text)
    shapes: dict[str, Callable[[str], bool]] = {
        "(": lambda t: t.startswith("(") and t.endswith(")"),
        r"\{": lambda t: t.startswith(r"\{") and t.endswith(r"\}"),
    }
    shape = next((name for name, holds in shapes.items() if holds(bare)), "")
    return shape if shape and _is_one_list(bare[len(shape) : -len(shape)]) else ""


def is_closed_within(inner: str) -> bool:
    """Returns True if no bracket closes in a text that it did not open."""
    depth = 0
    for c in inner:
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            return False
    return True


def _is_one_list(inner: str) -> bool:
    """Returns True if brackets around a text hold a list: a comma at the top, and brackets closed within."""
    depth, has_comma = 0, False
    for c in inner:
        depth += (c in "([{") - (c in ")]}")
        has_comma = has_comma or (c == "," and depth == 0)
    return has_comma and is_closed_within(inner)


def _ascii(c: str) -> str:
    """A character as a parser knows it: a full-width one, a fraction."""
    kind, _, points = unicodedata.decomposition(c).partition(" ")
    if kind == "<wide>":
        return chr(int(points, 16))
    if kind == "<fraction>":
        over, under = "".join(chr(int(p, 16)) for p in points.split()).split("\u2044")
        return rf"\frac{{{over}}}{{{under}}}" if under else c
    return c
