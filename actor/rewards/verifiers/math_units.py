r"""Units after a number and currencies before it: split off, and compared if both are known."""

import re
from fractions import Fraction

_BEHIND = re.compile(
    r"(?P<value>.*[\d})\]a-z!])\s*?"
    r"(?:\\text\s*\{(?P<text>[^{}]*)\}|(?<=[\d})])\s*(?P<words>[A-Za-z][A-Za-z./ -]*)"
    r"|\s+(?P<apart>[A-Za-z]{2,}[A-Za-z./ -]*))"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?\s*\.?\s*",
    re.DOTALL,
)
_CURRENCY = re.compile(r"\s*(?:\\\$|[\u20ac\u00a3\u00a5])\s*|\s*(?:\\\$|[\u20ac\u00a3\u00a5])\s*$")
_NO_UNITS = frozenset(
    re.findall(
        r"\w+",
        """a about all an and any approximately are at base because billion but by choose correct cubed divided dozen
        either exactly exceed except factorial false for from gross hundred if incorrect increased is isn k least less
        many maximum may maybe million minimum minus mod modulo more most multiplied n neither never no nor not of on
        one only or out over plus possible possibly right score squared than then thousand times to trillion
        true unless until versus vs was when where which with without wrong x y z""",
    )
)
"""Words that make the text after a number part of the statement: `3 is wrong`, `5 times`."""
_CAPITALS = ("A", "K", "N")
"""Units whose small letters are no units."""
_NUMBER = re.compile(r"\d|\\pi(?![A-Za-z])|\\sqrt")
_LENGTH = {"mm": "1/1000", "cm": "1/100", "m": "1", "km": "1000", "in": "127/5000", "ft": "381/1250", "yd": "1143/1250"}
_KNOWN: dict[str, tuple[str, Fraction]] = {
    **{name: ("length", Fraction(size)) for name, size in (_LENGTH | {"mi": "201168/125"}).items()},
    **{n: ("time", Fraction(s)) for n, s in {"s": 1, "min": 60, "h": 3600, "day": 86400, "week": 604800}.items()},
    **{n: ("time in months", Fraction(s)) for n, s in {"month": 1, "year": 12}.items()},
    **{n: ("mass", Fraction(s)) for n, s in {"mg": "1/1000", "g": 1, "kg": 1000}.items()},
    **{n: ("weight", Fraction(s)) for n, s in {"oz": 1, "lb": 16}.items()},
    **{n: ("volume", Fraction(s)) for n, s in {"ml": "1/1000000", "l": "1/1000"}.items()},  # in cubic meters
    **{n: ("money", Fraction(s)) for n, s in {"dollar": 1, "cent": "1/100"}.items()},
}
_SHORT = {
    "millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km", "inch": "in", "inche": "in", "foot": "ft",
    "feet": "ft", "yard": "yd", "mile": "mi", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "milligram": "mg", "gram": "g", "kilogram": "kg", "ounce": "oz", "pound": "lb", "milliliter": "ml", "liter": "l",
    "millimetre": "mm", "centimetre": "cm", "metre": "m", "kilometre": "km", "litre": "l", "¢": "cent", "day": "day",
}  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


def split(text: str) -> tuple[str, str]:
    r"""Returns a quantity's value and unit, empty for none: 12 and cm for `12\text{ cm}`, 5 and dollar for `\$5`."""
    value, unit = text, ""
    if found := _BEHIND.fullmatch(text):
        words = (found["text"] or found["words"] or found["apart"] or "").strip()
        names = re.findall(r"[A-Za-z]+", words.lower())
        # One letter directly after a value is a variable; a one-letter unit is marked as text.
        is_unit = bool(names) and not _NO_UNITS.intersection(names) and re.fullmatch(r"[A-Za-z./\s^\d'’-]*", words)
        is_unit = is_unit or words in _CAPITALS
        if is_unit and (found["text"] is not None or _is_unit(words)) and _NUMBER.search(found["value"]):
            value, unit = found["value"].strip(), words.lower() + (f"^{found['power']}" if found["power"] else "")
    if (bare := _CURRENCY.sub("", value)) != value:
        value, unit = bare.strip(), unit or "dollar"
    return value, unit


def _is_unit(words: str) -> bool:
    """Returns True if unmarked words are known units, or cannot be a product of variables."""
    return (
        len(words) > 1
        and _measured(words.lower()) is not None
        or all(len(w) > 2 and re.search("[aeiou]", w) for w in re.findall(r"[A-Za-z]+", words.lower()))
    )


def ratio(unit: str, other: str) -> Fraction | None:
    """Returns the size of a unit in another unit, 0 if they measure different things; None if one is unknown."""
    if not unit or not other or unit == other:
        return Fraction(1)
    measured, other_measured = _measured(unit), _measured(other)
    if measured is None or other_measured is None:
        return None
    (kind, size), (other_kind, other_size) = measured, other_measured
    return size / other_size if kind == other_kind else Fraction(0)


def _measured(unit: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """Returns a unit's dimensions with powers, and its size; None if a part of its name is unknown."""
    kinds: list[tuple[str, int]] = []
    size = Fraction(1)
    for i, factor in enumerate(re.split(r"/|\bper\b", unit.replace("mph", "mi/h").replace("kmh", "km/h"))):
        power, sign = 1, -1 if i else 1
        for word in re.findall(r"[a-z¢]+|\^\s*\{?\s*\d", factor):
            if word.startswith("^"):
                kinds[-1:] = [(kinds[-1][0], kinds[-1][1] * int(word[-1]))] if kinds else []
                size *= last ** (sign * (int(word[-1]) - 1)) if kinds else 1
                continue
            if word in _POWERS:
                power = _POWERS[word]
                continue
            name = _SHORT.get(word) or _SHORT.get(word.removesuffix("s")) or (word if word in _KNOWN else "")
            name = name or (word.removesuffix("s") if word.removesuffix("s") in _KNOWN else "")
            if not name:
                return None
            kind, last = _KNOWN[name]
            kinds.append(("length", 3 * sign * power) if kind == "volume" else (kind, sign * power))
            size *= last ** (sign * power)
    return (tuple(kinds), size) if kinds else None
