"""How a judge's answer is read: text in, a number out, or a reason why there is none. Pure."""

import json
import math
import re
from typing import Any

from configs.sections.judge import JudgeConfig

MAX_CHARS = 50_000
"""Of an answer: its end. Nobody says more than this after what counts."""
_TYPES: dict[str, tuple[type, ...]] = {"number": (int, float), "string": (str,), "boolean": (bool,)}


class UnreadableError(ValueError):
    """An answer that holds no score; `kind` says in a word what was wrong."""

    def __init__(self, kind: str, said: str) -> None:
        """`said` is for people."""
        super().__init__(said)
        self.kind = kind


def raw_score(text: str, config: JudgeConfig) -> float:
    """The number that an answer gives, as it stands there.

    Raises:
      UnreadableError: it gives none.
    """
    text = text.rpartition("</think>")[2][-MAX_CHARS:]
    number = {"json": _by_json, "regex": _by_pattern, "verdict": _by_word}[config.parser](text, config)
    if not math.isfinite(number):
        raise UnreadableError("not_finite", f"the score is {number}")
    return number


def scaled(number: float, config: JudgeConfig) -> float:
    """A score between 0 and 1: clamped to the bounds of the config, which become 0 and 1."""
    clamped = min(max(number, config.min_score), config.max_score)
    return (clamped - config.min_score) / (config.max_score - config.min_score)


def schema(config: JudgeConfig) -> dict[str, Any]:
    """The `response_format` that asks for an answer which `raw_score` reads."""
    properties = {name: {"type": kind} for name, kind in config.json_fields.items()}
    body = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "score", "schema": body, "strict": True}}


def last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object of a text that is in no other; None if there is none."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    found, at = None, text.find("{")
    while at >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _by_json(text: str, config: JudgeConfig) -> float:
    found = last_object(text)
    if found is None:
        raise UnreadableError("no_json", f"no JSON object in {text[-80:]!r}")
    for name, kind in config.json_fields.items():
        value = found.get(name)
        # To Python a truth value is a number.
        if not isinstance(value, _TYPES[kind]) or (kind == "number" and isinstance(value, bool)):
            raise UnreadableError("wrong_schema", f"{name} must be a {kind}, got {str(value)[:80]!r}")
    return _number(found["score"])


def _by_pattern(text: str, config: JudgeConfig) -> float:
    matches = [*re.finditer(config.pattern, text)]
    if not matches:
        raise UnreadableError("no_match", f"judge.pattern is not in {text[-80:]!r}")
    return _number(matches[-1].group(1))


def _by_word(text: str, config: JudgeConfig) -> float:
    scores = {word.casefold(): score for word, score in config.verdicts.items()}
    longest_first = "|".join(re.escape(w) for w in sorted(scores, key=len, reverse=True))
    words = re.findall(rf"(?<!\w)(?:{longest_first})(?!\w)", text.casefold())
    if not words:
        raise UnreadableError("no_verdict", f"none of {', '.join(config.verdicts)} is in {text[-80:]!r}")
    return scores[words[-1]]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise UnreadableError("no_number", f"{str(value)[:80]!r} is no number") from e


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
