"""Row parser: validates a row of a file and converts it to a problem."""

import dataclasses
import decimal
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from bridge import code_tests
from bridge.rollout_types import MAX_REWARD_PARTS
from bridge.text.chat_template import JsonObject
from configs import custom_functions
from configs.sections import PromptsConfig
from configs.sections.prompts import VERIFIERS, PromptSource
from learner.data.conversations import (
    MEDIA_PREFIXES,
    NotARowError,
    asked_text,
    is_media,
    is_unicode,
    read_prompt,
    read_tools,
    short,
    text_of,
)
from learner.data.problem import Answer, RawProblem, answer_text, task_of

_NEED_NO_ANSWER = frozenset({"code", "judge", "format"})
"""Verifiers that read only the row's metadata or the response."""


_NOT_READ = {
    "tools": "prompts.tools_field=tools",
    "functions": "prompts.tools_field=functions",
    "template_arguments": "prompts.template_arguments_field=template_arguments",
    "chat_template_kwargs": "prompts.template_arguments_field=chat_template_kwargs",
    "documents": "prompts.template_arguments_field, a column with an object that has the documents in it",
}
"""Columns that chat templates use under various names, and the config fields that make them read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Format of a source's rows."""

    source: PromptSource
    rewards_field: str
    metadata_field: str
    tools_field: str = ""
    template_arguments_field: str = ""
    teacher_field: str = ""
    ignored_fields: frozenset[str] = frozenset()
    """Message and row fields that prompts leave out on purpose."""
    verifiers: frozenset[str]
    """Verifiers that rows may name: built-in ones and custom ones in the config. A file cannot make code be
    imported."""
    teachers: frozenset[str] = frozenset()
    """Teachers that rows may name."""
    needs_teacher: bool = False
    """True if a row without a teacher is invalid."""
    needs_format: bool = False
    """True if a row for verifier format must have its own pattern."""
    response_field: str = ""
    """Column with the response of supervised rows; empty: rows are for reinforcement learning."""

    @classmethod
    def of(cls, prompts: PromptsConfig, source: PromptSource) -> "RowFormat":
        """Returns the format of one of the config's sources, without fields that depend on other config sections."""
        return cls(
            source=source,
            rewards_field=prompts.rewards_field,
            metadata_field=prompts.metadata_field,
            tools_field=prompts.tools_field,
            template_arguments_field=prompts.template_arguments_field,
            teacher_field=prompts.teacher_field,
            ignored_fields=frozenset(prompts.ignored_names),
            verifiers=frozenset((*VERIFIERS, *filter(custom_functions.is_custom, prompts.parts | source.parts))),
        )

    @property
    def columns(self) -> list[str]:
        """Columns to read. `image*` matches all columns with the prefix, and `!images` excludes a column."""
        others = (self.tools_field, self.template_arguments_field, *_NOT_READ, *(f"{p}*" for p in MEDIA_PREFIXES))
        named = dict.fromkeys((*self._own, *(f for f in others if f not in self.ignored_fields)))
        return [*(f for f in named if f), *(f"!{f}" for f in sorted(self.ignored_fields) if f not in self._own)]

    @property
    def read_fields(self) -> frozenset[str]:
        """Fields that the parser uses."""
        return frozenset((*self._own, self.tools_field, self.template_arguments_field))

    @property
    def _own(self) -> tuple[str, ...]:
        if self.response_field:
            return self.source.prompt_field, self.response_field
        fields = (self.source.prompt_field, self.source.answer_field, self.rewards_field, self.metadata_field)
        return (*fields, self.teacher_field)


def parse_row(number: int, row: dict[str, Any], form: RowFormat) -> RawProblem | str:
    """Returns the problem of row `number`, or the reason why it is invalid.

    A prompt is text or a conversation (a list of {role, content}, also as JSON text). An answer is text or a number.
    The metadata holds other verifier inputs, and the rewards column holds per-row verifiers.
    """
    try:
        return problem_of(number, row, form)
    except NotARowError as e:
        return str(e)


def problem_of(number: int, row: dict[str, Any], form: RowFormat) -> RawProblem:
    """Returns the problem of row `number`, as `parse_row`, or raises NotARowError if it is invalid."""
    if form.response_field:
        return _supervised(number, row, form)
    source = form.source
    parts = _parts(row, form)
    needs_answer = not (parts.keys() <= _NEED_NO_ANSWER)  # episodes without verifiers need none
    wanted = (source.prompt_field, *((source.answer_field,) if needs_answer else ()))
    _check_there(row, wanted)
    answer = _answer(row.get(source.answer_field), source.answer_field, needs_answer)
    metadata = _object(row, form.metadata_field)
    if "reasoning_gym" in parts and not _is_entry(metadata):
        raise NotARowError("verifier reasoning_gym needs the library's entry as metadata (metadata.source_dataset)")
    if "code" in parts:
        try:
            code_tests.read(metadata)
        except ValueError as e:
            raise NotARowError(str(e)) from e
    if "format" in parts and (pattern := metadata.get("format")):
        _check_pattern(pattern)
    elif "format" in parts and form.needs_format:
        raise NotARowError("verifier format needs rewards.format_pattern, or a pattern in the row's metadata (format)")
    question, messages, tools = _prompt(row, form)
    if "judge" in parts:  # the judge prompt contains the question
        metadata = {"question": question} | {name: v for name, v in metadata.items() if v is not None}
    task = task_of(
        answer,
        parts,
        answer_in=source.answer_in,
        metadata=metadata,
        environment=source.environment,
        teacher=_teacher(row, form),
    )
    arguments = _template_arguments(row, form)
    asked = asked_text(messages)
    return RawProblem(question, messages, task, number, tools, arguments, asked=asked)


def _supervised(number: int, row: dict[str, Any], form: RowFormat) -> RawProblem:
    """Returns a supervised row. Its question is that of the same prompt in reinforcement learning."""
    _check_there(row, (form.source.prompt_field,))
    response, field = row.get(form.response_field), form.response_field
    question, messages, tools = _prompt(row, form)
    asked = messages
    if _is_missing(response):
        if not any(m["role"] == "assistant" for m in messages):
            raise NotARowError(f"no field {field!r}, and no assistant message in {form.source.prompt_field!r}")
        asked = tuple(itertools.takewhile(lambda m: m["role"] != "assistant", messages))
        question, text = "\n".join(map(text_of, asked)), ""
        if not question.strip():
            raise NotARowError(f"{form.source.prompt_field!r} must have text before the first assistant message")
    else:
        text = answer_text(_answer(response, field, is_needed=True))
    task = task_of("", form.source.parts, answer_in=form.source.answer_in)
    arguments = _template_arguments(row, form)
    return RawProblem(question, messages, task, number, tools, arguments, response=text, asked=asked_text(asked))


def _check_there(row: dict[str, Any], wanted: Sequence[str]) -> None:
    if missing := [f for f in wanted if _is_missing(row.get(f))]:
        raise NotARowError(
            f"no field {' and no field '.join(map(repr, missing))}, or it is null or NaN "
            f"(fields: {', '.join(sorted(map(str, row)))})"
        )


def _is_missing(value: Any) -> bool:
    """Returns True for null, and for NaN, which tables use for missing numbers."""
    return value is None or (isinstance(value, float | decimal.Decimal) and math.isnan(value))


def _answer(answer: Any, field: str, is_needed: bool) -> Answer:
    if _is_missing(answer) and not is_needed:
        return ""
    is_answer = isinstance(answer, str | int | float | decimal.Decimal) and not isinstance(answer, bool)
    if not is_answer or (is_needed and not str(answer).strip()):
        raise NotARowError(f"{field!r} must be text or a number, got {answer!r}")
    if isinstance(answer, float | decimal.Decimal) and not math.isfinite(answer):
        raise NotARowError(f"{field!r} must be finite, got {answer!r}")
    if not is_unicode(str(answer)):
        raise NotARowError(f"{field!r} must be valid Unicode text, got {answer!r}")
    return answer


def _prompt(row: dict[str, Any], form: RowFormat) -> tuple[str, tuple[JsonObject, ...], tuple[JsonObject, ...]]:
    """Returns (question, messages if it is a conversation, tools)."""
    field, ignored = form.source.prompt_field, form.ignored_fields
    left_out = [n for n in map(str, row) if n not in ignored and n not in form.read_fields]
    if media := [n for n in left_out if is_media(n, row[n])]:
        raise NotARowError(
            f"the row has {media[0]!r}, and only text is read: a column whose name begins with "
            f"{', '.join(MEDIA_PREFIXES)} may hold media, text or not; remove the column, or set "
            f"prompts.ignored_fields={','.join(media)}"
        )
    if unread := [n for n in left_out if n in _NOT_READ and row[n] not in (None, "", "[]", "{}", [], {})]:
        raise NotARowError(
            f"the row has {unread[0]!r}, which is not read; set {_NOT_READ[unread[0]]}, or name it in "
            "prompts.ignored_fields"
        )
    tools = row.get(form.tools_field) if form.tools_field and form.tools_field not in ignored else None
    is_whole = bool(form.response_field) and _is_missing(row.get(form.response_field))
    question, messages = read_prompt(row[field], field, ignored=ignored, is_whole=is_whole)
    return question, messages, read_tools(tools, form.tools_field) if tools and tools != "[]" else ()


def _parts(row: dict[str, Any], form: RowFormat) -> dict[str, float]:
    field = form.rewards_field
    given = row.get(field) if field else None
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise NotARowError(f"{field!r} must be a list, or JSON of one, got {short(given)}") from None
    if given in (None, "", []):
        return form.source.parts
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_REWARD_PARTS:
        raise NotARowError(f"{field!r} must be a list of 1 to {MAX_REWARD_PARTS} {{name, weight}}, got {short(given)}")
    parts: dict[str, float] = {}
    for part in given:
        given_fields = {k for k, v in part.items() if v is not None} if isinstance(part, dict) else {"?"}
        if not given_fields <= {"name", "weight"} or not isinstance(part.get("name"), str):
            raise NotARowError(f"{field!r}: every part is {{name, weight}}, got {short(part)}")
        name = part["name"]
        weight = 1.0 if part.get("weight") is None else part["weight"]
        if name not in form.verifiers:
            needed = "; judge needs judge.url or judge.colocate" if name == "judge" else ""
            known = ", ".join(sorted(form.verifiers))
            raise NotARowError(f"{field!r}: no verifier {name!r}; there are {known}{needed}")
        if name in parts:
            raise NotARowError(f"{field!r} names {name!r} twice")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not _counts(weight):
            raise NotARowError(f"{field!r}: the weight of {name!r} must be a finite number and not 0, got {weight!r}")
        parts[name] = float(weight)
    return parts


def _teacher(row: dict[str, Any], form: RowFormat) -> str:
    """Returns the teacher that the row names, else its source's."""
    given = row.get(form.teacher_field) if form.teacher_field else None
    if given is None or given == "":
        if form.needs_teacher and not form.source.teacher:
            raise NotARowError(f"no teacher in {form.teacher_field!r}, which loss.advantage=none requires")
        return form.source.teacher
    if not isinstance(given, str) or given not in form.teachers:
        raise NotARowError(
            f"{form.teacher_field!r}: no teacher {short(given)}; there are {', '.join(sorted(form.teachers))}"
        )
    return given


def _counts(weight: float) -> bool:
    try:
        return math.isfinite(weight) and weight != 0
    except OverflowError:  # an integer beyond float64
        return False


def _object(row: dict[str, Any], field: str) -> dict[str, Any]:
    """Returns the object in a row's field, decoded if it is JSON text; empty if the field is absent."""
    given = row.get(field) if field else None
    if given is None:
        return {}
    found: Any = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except ValueError:
            found = None
    if not isinstance(found, dict):
        raise NotARowError(f"{field!r} must be an object, or JSON of one, got {short(given)}")
    return found


def _check_pattern(pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as e:
        raise NotARowError(f"metadata format: expected a regular expression, got {short(pattern)} ({e})") from e


def _template_arguments(row: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    """Returns a row's template arguments without null ones: tables give every row the keys of all rows."""
    return {name: v for name, v in _object(row, form.template_arguments_field).items() if v is not None}


def _is_entry(metadata: dict[str, Any]) -> bool:
    inner = metadata.get("metadata")
    return isinstance(inner, dict) and bool(inner.get("source_dataset"))
