"""Judge prompts and parsing of the judge's answer to a number or an error. Pure."""

import json
import math
import pathlib
import re
import secrets
from typing import Any

from bridge.rollout_types import Task
from bridge.text import thinking
from configs.sections.rewards import PLACEHOLDERS, JudgeConfig, check_template

_PLACEHOLDER = re.compile("|".join(rf"\{{({name})\}}" for name in PLACEHOLDERS))
_BAR = "[|\uff5c]"
"""Bar in control tokens, full-width in some models."""
_CONTROL = re.compile(
    rf"<{_BAR}[^|\uff5c<>\s]{{1,40}}{_BAR}>"
    r"|<</?[A-Z]+>>|</?(?:s|bos|eos|pad|unk|mask|cls|sep|think|\w{0,40}[_:]\w{0,40})>"
    r"|\[/?(?:[gs]?[A-Z][A-Z_]{2,40}|sop|eop)\]"
)
"""Shape of chat templates' control tokens, which a server would also interpret within a response's text."""
_WORD_JOINER = "\u2060"


def judge_messages(
    template: str, system_prompt: str, task: Task, response_text: str, max_chars: int
) -> list[dict[str, str]]:
    """Returns the messages of a request.

    The response is enclosed in markers with a nonce per request, so that it cannot close them. Control tokens in it are
    broken up, so that it cannot begin a message. The template is filled in one pass: braces and placeholders in a
    response are plain text. A model may still believe text in the response. The system prompt asks it not to, and a
    score is always a number within its bounds. Raises ValueError if the template has a question, but the task's
    metadata has none.
    """
    nonce = secrets.token_hex(8)
    values = {
        "answer": task.answer,
        "response": f"<<<response {nonce}>>>\n{harmless(shortened(response_text, max_chars))}\n<<<end {nonce}>>>",
    }
    if "{question}" in template:
        values["question"] = _question(task)
    filled = _PLACEHOLDER.sub(lambda m: values[m.group()[1:-1]], template)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": filled}]


def shortened(text: str, max_chars: int) -> str:
    """Returns a text of about `max_chars` characters, with a note in place of its middle."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"


def harmless(text: str) -> str:
    """Returns a text with its control tokens broken up by an invisible character."""
    while (broken := _CONTROL.sub(lambda m: m.group()[0] + _WORD_JOINER + m.group()[1:], text)) != text:
        text = broken  # one may be within another
    return text


def _question(task: Task) -> str:
    metadata = json.loads(task.metadata)
    question = metadata.get("question") if isinstance(metadata, dict) else None
    if not isinstance(question, str):
        raise ValueError(
            "judge.template uses {question}, but the row's metadata has no such text; remove it, or add the text to "
            "the row"
        )
    return question


def read_template(config: JudgeConfig) -> str:
    """Returns the request template, from the config or its file. Raises ValueError if the file is unusable."""
    if not config.template.startswith("@"):
        return config.template
    try:
        template = pathlib.Path(config.template[1:]).expanduser().read_text(encoding="utf-8")
        check_template(template)
    except (OSError, ValueError) as e:
        raise ValueError(f"judge.template={config.template} cannot be used: {e}") from e
    return template


MAX_CHARS = 50_000
"""Maximum characters of an answer; only its end is read."""
_AROUND_WORDS = " \t*_`\"'.!"
"""Characters allowed around a verdict on its line."""
_TYPES: dict[str, tuple[type, ...]] = {"number": (int, float), "string": (str,), "boolean": (bool,)}


class JudgeParseError(ValueError):
    """An answer without a valid score; `kind` is a one-word cause."""

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(said)
        self.kind = kind


def raw_score(text: str, config: JudgeConfig) -> float:
    """Returns the number that an answer gives, unscaled. Raises JudgeParseError if the answer gives none."""
    text = thinking.DEFAULT.split(text).answer[-MAX_CHARS:]
    number = {"json": _by_json, "regex": _by_pattern, "verdict": _by_word}[config.parser](text, config)
    if not math.isfinite(number):
        raise JudgeParseError("not_finite", f"the score is {number}")
    return number


def scaled(number: float, config: JudgeConfig) -> float:
    """Returns a score in [0, 1]: clamped to the config's bounds and rescaled."""
    clamped = min(max(number, config.min_score), config.max_score)
    return (clamped - config.min_score) / (config.max_score - config.min_score)


def schema(config: JudgeConfig) -> dict[str, Any]:
    """Returns the `response_format` for answers that `raw_score` can read."""
    properties = {name: {"type": kind} for name, kind in config.json_fields.items()}
    body = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "score", "schema": body, "strict": True}}


def objects(text: str) -> list[dict[str, Any]]:
    """Returns the outermost JSON objects of a text, as written."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    found, at = [], text.find("{")
    while at >= 0:
        try:
            one, end = decoder.raw_decode(text, at)
            found.append(one)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _by_json(text: str, config: JudgeConfig) -> float:
    found = objects(text)
    if not found:
        raise JudgeParseError("no_json", f"no JSON object in {text[-80:]!r}")
    for name, kind in config.json_fields.items():
        value = found[-1].get(name)
        # Python's bool is an int.
        if not isinstance(value, _TYPES[kind]) or (kind == "number" and isinstance(value, bool)):
            raise JudgeParseError("wrong_schema", f"{name} must be a {kind}, got {str(value)[:80]!r}")
    return _the_one([one["score"] for one in found if "score" in one])


def _by_pattern(text: str, config: JudgeConfig) -> float:
    found = [match.group(1) for match in re.finditer(config.pattern, text)]
    if not found:
        raise JudgeParseError("no_match", f"judge.pattern is not in {text[-80:]!r}")
    return _the_one(found)


def _by_word(text: str, config: JudgeConfig) -> float:
    """Returns the score of a verdict alone on the last line: within a sentence it may be negated ("not correct")."""
    scores = {word.strip().casefold(): score for word, score in config.verdicts.items()}
    line = text.strip().rpartition("\n")[2].strip().casefold()
    for word in (line, line.strip(_AROUND_WORDS)):
        if word in scores:
            return scores[word]
    raise JudgeParseError("no_verdict", f"the last line must be one of {', '.join(config.verdicts)}: {line[-80:]!r}")


def _the_one(stated: list[Any]) -> float:
    """Returns the number if all are equal: an answer with two may quote one from the response."""
    numbers = [_number(value) for value in stated]
    if any(number != numbers[-1] for number in numbers) and not math.isnan(numbers[-1]):
        raise JudgeParseError("ambiguous", f"contradicting scores: {', '.join(map(str, numbers[-8:]))}")
    return numbers[-1]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise JudgeParseError("no_number", f"{str(value)[:80]!r} is not a number") from e


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
