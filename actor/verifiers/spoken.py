"""Numbers in words, rewritten in digits: `twelve`, `twenty-five apples`, `3 million`."""

import re

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
    r"""Returns a number in words as digits, with the words of its unit as `\text`; any other text as it is."""
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
    """Returns the number that words begin with, and how many of them it takes; None if they do not form one."""
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
