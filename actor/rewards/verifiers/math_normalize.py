"""Normalization of LaTeX and numbers, and cheap bounds on the size of expressions.

No bound catches every expensive expression; the rest runs into its worker's timeout (`../verifier_pool.py`). Each rule
has pairs in `tests/actor/rewards/verifiers/math_pairs.jsonl` that would be scored wrongly without it.
"""

import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from actor.rewards.verifiers import math_units

MAX_CHARS = 2000
"""Maximum characters of an answer, or four times those of the reference answer if larger."""
MAX_DEPTH = 60
"""Maximum depth of nested brackets."""
MAX_FRACTIONS = 20
"""Maximum divisions of an answer, or twice those of the reference answer if larger: the algebra system nests them."""
MAX_EXPONENT = 10_000
"""Maximum exponent, and maximum argument of a factorial, that is computed."""
_BOUNDS_EXPONENT = re.compile(r"\^\s*\{?\s*[-+]?\s*(\d+)")
_TOWER = re.compile(r"\^\s*\{\s*(\d+)\s*\^\s*\{?\s*(\d+)")
_FACTORIAL = re.compile(r"(\d+)\s*!|[)}\]!]\s*!")
_LOOPS = re.compile(r"\\(?:sum|prod|d?binom|tbinom|bigcup|bigcap)(?![A-Za-z])")
_POWER = re.compile(r"(\d+)\s*\^\s*\{?\s*(\d+)")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_SIGNS = re.compile(r"(?:[-+]\s*){50}")


def is_too_long(answer: str, gold: str) -> bool:
    """Returns True if an answer is too long to be read by any other rule."""
    return len(answer) > max(MAX_CHARS, 4 * len(gold))


def exceeds_complexity(answer: str, gold: str) -> bool:
    """Returns True if an answer is too long, too deep or too large to be computed."""
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
    if any(_is_above(n) for n in _BOUNDS_EXPONENT.findall(text)):
        return True
    if any(_power(a, b) > MAX_EXPONENT for a, b in _TOWER.findall(text)):
        return True
    return re.search(r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^\s*\{", text) is not None  # three levels of exponents


def _has_large_factorial(text: str) -> bool:
    has_variable = bool(_VARIABLE.search(text))
    return any(_is_above(m[1]) if m[1] else not has_variable for m in _FACTORIAL.finditer(text))


def _largest_number(text: str) -> float:
    numbers = (float(n) if len(n) < 300 else math.inf for n in re.findall(r"\d+", text))
    return max([*numbers, *(_power(a, b) for a, b in _POWER.findall(text))], default=0.0)


def _is_above(digits: str) -> bool:
    return len(digits.lstrip("0")) > 5 or int(digits) > MAX_EXPONENT


def _power(base: str, exponent: str) -> float:
    if len(base) > 300 or len(exponent) > 300:
        return math.inf
    try:
        return float(base) ** float(exponent)
    except OverflowError:
        return math.inf


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
    """Returns a text with its repeating decimals as fractions; with an ellipsis, digits must repeat visibly."""
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


_SMALL = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
    "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORDS = re.compile(r"(?:\\text\s*\{\s*)?([A-Za-z]+(?:[\s-]+[A-Za-z]+){0,7})\s*\}?", re.IGNORECASE)
_SCALED = re.compile(
    r"((?:\\\$\s*)?-?\d[\d,]*(?:\.\d+)?)\s*(?:\\text\s*\{)?\s*"
    r"(thousand|million|billion|trillion)(?![A-Za-z])\s*([A-Za-z ]*?)\s*\}?",
    re.IGNORECASE,
)


def in_digits(text: str) -> str:
    r"""Returns a number in words as digits, with its unit's words as `\text`; any other text unchanged."""
    if scaled := _SCALED.fullmatch(text):
        unit = rf"\text{{ {scaled[3]}}}" if scaled[3] else ""
        return rf"{scaled[1]} \times 10^{{{_POWERS[scaled[2].lower()]}}}{unit}"
    if not (found := _WORDS.fullmatch(text)):
        return text
    words = re.split(r"[\s-]+", found[1].lower())
    number, used = _number(words)
    unit = words[used:]
    if number is None or len(unit) > 2 or (unit and words[0] in ("one", "zero")):  # "one of them"
        return text
    return f"{number}" + (rf"\text{{ {' '.join(unit)}}}" if unit else "")


def _number(words: list[str]) -> tuple[int | None, int]:
    """Returns the number that words begin with, and the number of words used; None if they form no number."""
    total, part, last, used = 0, None, 0, 0
    for word in words:
        if word in _SMALL:
            n = _SMALL[word]
            fits = part is None or (last >= 20 and last % 10 == 0 and n < 10) or (last == 100 and n < 100)
            if not fits or (n == 0 and part is not None):
                return None, 0
            part, last = (part or 0) + n, n
        elif word == "hundred" and part and part < 100:
            part, last = part * 100, 100
        elif word in _POWERS and part:
            total, part, last = total + part * 10 ** _POWERS[word], None, 0
        elif word == "and" and last == 100:
            pass
        else:
            break
        used += 1
    return (total + (part or 0) if used and words[used - 1] != "and" else None), used


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
    \s?\)?\s?(?:[%°]|\^\s?\\circ)?\s?(?:[A-Za-z]+(?:[\s'’-][A-Za-z]+)*)?[\s.]*""",
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


def normalize_latex(text: str, *, has_e: bool = False) -> str:
    r"""Returns an expression without formatting and with odd notation rewritten: `1\,000`, `1.2e5`, `0.\overline{3}`.

    `has_e`: the reference answer has, or may have, the number e in it. Then 3e-4 is 3e less 4; 1.2e5 is still 120000.
    """
    text = _undressed(" ".join(text.translate(_DASHES).split()))
    text = _RAISED.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(map(_ascii, text))
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = _GROUPED.sub(lambda m: re.sub(r"\D", "", m.group()), text)
    text = as_fractions(_SPACE.sub(" ", text))
    text = _EXPONENT.sub(lambda m: m[0] if has_e and "." not in m[1] else rf"{m[1]} \times 10^{{{m[2]}}}", text)
    if mixed := _MIXED.fullmatch(text):
        text = "{}{}\\frac{{{}}}{{{}}}".format(*mixed.groups())
    text = _DEGREES.sub(r"\1\\frac{\2 \\pi}{180}", text)
    if named := _NAMED.fullmatch(text):  # 5 = x
        text = f"{named[2]} = {named[1]}"
    return in_digits(re.sub(r"(?<!\\)[.,;:]+\s*$", "", text.strip()))


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
        return rf"\text {{{inner}}}"  # the space marks it as already processed
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
    """Returns True if the number e occurs in an expression."""
    return bool(_EULER.search(text))


def is_scientific(text: str) -> bool:
    """Returns True if a whole text is a number such as 1e6, -1e-5 or 3e-06; 3e-4 may be 3e less 4."""
    return _SCIENTIFIC.fullmatch(text.translate(_DASHES)) is not None


def without_percent(text: str) -> str | None:
    """Returns the text before a percent sign at the end; None if there is none."""
    stripped = _PERCENT.sub("", text)
    return stripped.strip() if stripped != text else None


def is_number(text: str) -> bool:
    r"""Returns True if an expression is one number in digits, as 42, -1,200, \$3.50 or 12.0."""
    return _NUMBER.fullmatch(text) is not None


def is_worked_out(text: str) -> bool:
    r"""Returns True if an expression, or the part after its last equals sign, needs no computation.

    It is one number in digits or a fraction in lowest terms. It may have a sign, a power of ten, a currency, a percent
    sign or a unit in words. Anything else is an unfinished calculation: 23 + 48, 6 / 2, \sqrt{2304}, 2^{10}.
    """
    last = math_units.split(text.rpartition("=")[2].strip())[0]
    last = _FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", last)
    found = _WORKED_OUT.fullmatch(" ".join(_DRESS.sub("", last).split()))
    if found is None:
        return False
    return found["under"] is None or (
        int(found["under"]) > 1 and math.gcd(int(found["over"]), int(found["under"])) == 1
    )


def brackets(text: str) -> str:
    r"""Returns the bracket around a whole expression: "(" (a tuple), "\{" (a set), or empty."""
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
    """Returns True if a bracketed text is a list: it has a top-level comma and closes its brackets."""
    depth, has_comma = 0, False
    for c in inner:
        depth += (c in "([{") - (c in ")]}")
        has_comma = has_comma or (c == "," and depth == 0)
    return has_comma and is_closed_within(inner)


def _ascii(c: str) -> str:
    """Returns a full-width character or a fraction character in ASCII; others unchanged."""
    kind, _, points = unicodedata.decomposition(c).partition(" ")
    if kind == "<wide>":
        return chr(int(points, 16))
    if kind == "<fraction>":
        over, under = "".join(chr(int(p, 16)) for p in points.split()).split("\u2044")
        return rf"\frac{{{over}}}{{{under}}}" if under else c
    return c
