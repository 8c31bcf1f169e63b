"""Whether what a program printed or returned is what its test case wants; outside of the sandbox, pure."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from bridge.code_tests import Compare

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
"""One way alone to read a run of digits: two make a long one quadratic."""
_WHOLE = re.compile(r"[+-]?\d+")


def is_printed(got: str, wanted: str, compare: Compare, tolerance: float) -> bool:
    """Whether standard output is right (`bridge.code_tests.Compare`)."""
    if compare == "exact":
        return _without_end(got) == _without_end(wanted)
    said, asked = got.split(), wanted.split()
    if compare == "tokens":
        return said == asked
    return len(said) == len(asked) and all(_near_text(a, b, tolerance) for a, b in zip(said, asked, strict=True))


def is_returned(got: Any, wanted: Any, compare: Compare, tolerance: float) -> bool:
    """Whether a function's result is right: values as JSON has them, so that a tuple is a list."""
    if isinstance(wanted, list):
        return (
            isinstance(got, list)
            and len(got) == len(wanted)
            and all(is_returned(a, b, compare, tolerance) for a, b in zip(got, wanted, strict=True))
        )
    if isinstance(wanted, Mapping):
        return (
            isinstance(got, Mapping)
            and got.keys() == wanted.keys()
            and all(is_returned(got[key], wanted[key], compare, tolerance) for key in wanted)
        )
    if _is_number(got) and _is_number(wanted):
        return _is_same_number(got, wanted, compare, tolerance)
    return type(got) is type(wanted) and got == wanted


def as_json(value: Any) -> Any:
    """A value as it looks after a way through JSON: what a case wants may have been written in another way.

    Raises:
      ValueError: it has no JSON.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, RecursionError) as e:
        raise ValueError(f"what a test case wants is no JSON: {type(e).__name__}") from e


def _without_end(text: str) -> str:
    return text.replace("\r\n", "\n").rstrip("\n")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same_number(got: float, wanted: float, compare: Compare, tolerance: float) -> bool:
    if compare == "exact" and type(got) is not type(wanted):
        return False
    if got == wanted or (got != got and wanted != wanted):
        return True
    # Whole numbers are counted, not measured.
    return (
        compare == "float" and not (isinstance(got, int) and isinstance(wanted, int)) and _near(got, wanted, tolerance)
    )


def _near_text(got: str, wanted: str, tolerance: float) -> bool:
    if got == wanted:
        return True
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(wanted)):
        return False
    if _WHOLE.fullmatch(got) and _WHOLE.fullmatch(wanted):
        return got.lstrip("+") == wanted.lstrip("+")
    return _near(float(got), float(wanted), tolerance)


def _near(got: float, wanted: float, tolerance: float) -> bool:
    try:
        a, b = float(got), float(wanted)
    except OverflowError:  # a whole number beyond float64
        return False
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))
