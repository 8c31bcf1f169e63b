r"""Answers that are no expressions, each read completely: choices, words, times, numbers with a base, residues.

If the reference or the stated answer has such a form, the form decides: `1010_2` is not 1010, and `11:15` no ratio.
"""

import re
from collections.abc import Callable

_MARKED = re.compile(
    r"\s*\(?\s*(?:the\s+)?(?:(?:option|choice|answer)\s*)?(?:\\text\s*\{\s*)?(?:(?:option|choice)\s*)?"
    r"(?:\(\s*([A-J])\s*\)|([A-J])\s*[).:](?=\s|\}|$|\\)|([A-J])\s*(?=\}|$))\s*[.:]?\s*(\}?)(.*)",
    re.DOTALL | re.IGNORECASE,
)
_ANOTHER = re.compile(r"^\W*(?:\\text\s*\{\s*)?(?:,|;|/|\bor\b|\band\b)")
_MARKED_LATER = re.compile(r"(?<!\w)\(\s*([A-J])\s*\)|(?:^|[,;{]|\bor\b|\band\b)\s*([A-J])\s*[).:](?=\s*\}?\s*\S)")
_LETTERS = re.compile(r"(?:\\text\s*\{)?\s*([A-J](?:[\s,;]*(?:\band\b\s*)?[A-J])+)\s*\}?")
_WORDS = re.compile(r"(?:\\text\s*\{)?([^\W\d_]+(?:[\s'\u2019,.-]+[^\W\d_]+)*)[\s.!]*\}?[\s.!]*")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_SPOKEN = frozenset({"yes", "no", "true", "false", "odd", "even", "none", "all"})
_TIME = re.compile(
    r"(\d{1,2})\s*:\s*([0-5]\d)(?:\s*:\s*([0-5]\d))?\s*(?:\\text\s*\{)?\s*(?:([ap])\s*\.?\s*m\b\.?)?\s*\}?",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])")
_BASE = re.compile(
    r"\{?(?:\\text\s*\{\s*)?\(?(-?[0-9A-Za-z]*\d[0-9A-Za-z]*)\)?\}?\}?\s*"
    r"_\s*(?:\{\s*(?:\\text\s*\{\s*)?(\d+)[\s}]*|(\d))"
)
_RATIO = re.compile(r"[^:]+(?::[^:]+)+")
_RESIDUE = re.compile(
    r"(?:[A-Za-z](?:_\w|_\{\w+\})?\s*(?:\\equiv|=)\s*)?(-?\w+)\s*"
    r"(?:\\p?mod|\\bmod|\(?\s*(?:\\text\s*\{\s*)?mod\s*\}?)\s*[{(]?\s*(\w+)\s*[})]?\s*\)?"
)
_ELLIPSIS = re.compile(r"\\(?:[lc]?dots|dotsc|dotsb)(?![A-Za-z])|\.\.\.|\u2026|\u22ef")


def choice(text: str) -> tuple[str, str] | None:
    r"""Returns the letter that a multiple-choice answer begins with, and the rest: B and 12 for `(B) 12`."""
    found = _MARKED.fullmatch(text)
    letter = next((g for g in found.groups()[:3] if g), "") if found else ""
    if not found or not letter.isupper() or _ANOTHER.match(found[5]):
        return None
    rest = found[5].strip()
    if any((m[1] or m[2]) != letter for m in _MARKED_LATER.finditer(rest)):
        return None
    return letter, rest[:-1].strip() if rest.endswith("}") and rest.count("{") < rest.count("}") else rest


def choices(text: str) -> frozenset[str]:
    """Returns the letters of an answer with several choices, as ABD or A, B, D; empty for other answers."""
    found = _LETTERS.fullmatch(text)
    letters = re.findall("[A-J]", found[1]) if found else []
    return frozenset(letters) if len(set(letters)) == len(letters) else frozenset()


def sequence(text: str) -> str:
    """Returns capital letters without separators that are not ascending, as CAB, whose order is the answer."""
    found = _LETTERS.fullmatch(text)
    is_sequence = found is not None and found[1].isalpha() and list(found[1]) != sorted(found[1])
    return found[1] if found and is_sequence else ""


def words(text: str) -> str:
    r"""Returns an answer of words alone, case-folded and with single spaces; empty for other answers."""
    bare = _TEXT.sub(r" \1 ", text).strip()
    found = _WORDS.fullmatch(bare) if "\\" not in bare else None
    if found is None:
        return ""
    said = " ".join(re.findall(r"[^\W\d_]+", found[1].casefold()))
    is_word = (bare != text.strip() and len(said) > 1) or said in _SPOKEN or bool(re.search(r"[^\W\d_]{4}", said))
    return said if is_word else ""


def time_of_day(text: str) -> tuple[int, int, int, str] | None:
    """Returns hour, minute, second, and "a", "p" or "" for the half of the day; hours above 12 imply the half."""
    found = _TIME.fullmatch(text.strip())
    if not found or int(found[1]) > 23:
        return None
    hour, half = int(found[1]), (found[4] or "").lower()
    if hour > 12:
        hour, half = hour - 12, half or "p"
    return hour, int(found[2]), int(found[3] or 0), half


def is_date(text: str) -> bool:
    """Returns True for a date such as 2024-03-01."""
    return _DATE.fullmatch(text.strip()) is not None


def base(text: str) -> tuple[str, int] | None:
    """Returns the digits and the base of a number such as 1010_2 or 2A7_{12}; None for other answers."""
    found = _BASE.fullmatch(text.strip())
    if not found:
        return None
    number = int((found[2] or found[3])[:4])
    digits = found[1].upper()
    is_number = 2 <= number <= 36 and all(c == "-" or int(c, 36) < number for c in digits)
    return (digits.lstrip("0") or "0", number) if is_number else None


def ratio(text: str) -> list[str]:
    """Returns the parts of a ratio such as 2:3:4; empty for other answers."""
    return [p.strip() for p in text.split(":")] if _RATIO.fullmatch(text) and re.search(r"\d", text) else []


def residue(text: str) -> tuple[str, str] | None:
    r"""Returns number and modulus of `5 \pmod 6`, also after `x \equiv`; None for other answers."""
    found = _RESIDUE.fullmatch(text.strip())
    if not found or not found[2].strip("0"):
        return None
    number, modulus = found[1], found[2]
    if number.lstrip("-").isdigit() and modulus.isdigit() and len(number + modulus) < 2000 and int(modulus) > 0:
        number = str(int(number) % int(modulus))
    return number, modulus


def with_one_ellipsis(text: str) -> str:
    """Returns a text with all ellipses in one notation."""
    return _ELLIPSIS.sub(r"\\dots ", text)


def match_all(gold: list[str], stated: list[str], are_equal: Callable[[str, str], bool], *, in_order: bool) -> bool:
    """Returns True if the elements of two lists are equal pairwise, in order or in any order."""
    if len(gold) != len(stated):
        return False
    if in_order:
        return all(are_equal(g, s) for g, s in zip(gold, stated, strict=True))
    left = list(stated)
    for g in gold:
        at = next((i for i, s in enumerate(left) if are_equal(g, s)), None)
        if at is None:
            return False
        del left[at]
    return True
