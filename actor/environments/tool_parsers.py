"""Tool call parsers: model text in, calls or an error for the model out. Pure.

No model text raises: errors are sentences addressed to the model. A call in a form that the parser does not accept is
such an error. A turn counts as free of calls only if nothing in it looks like a call.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from bridge.text.thinking import DEFAULT, ThinkingFormat

MAX_CALLS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """Call of one tool."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Tool calls of one turn."""

    calls: tuple[ToolCall, ...] = ()
    """Calls as written; empty if there are none or one is invalid."""
    error: str = ""
    """Error message for the model."""


def parse(parser: str, text: str, tools: Collection[str], *, thinking: ThinkingFormat | None = DEFAULT) -> Calls:
    """Returns the calls in the text of a turn, special tokens included, outside its thinking.

    `thinking` has the marks around thinking; None if `text` is only the answer, like the action of `Environment.step`.
    Raises ValueError if `parser` is not one of `PARSERS`.
    """
    if parser not in PARSERS:
        raise ValueError(f"no tool call parser {parser!r}; expected one of {', '.join(PARSERS)}")
    answer = text if thinking is None else thinking.split(text).answer
    try:
        calls = PARSERS[parser](answer, tools) or _refuse_other_forms(parser, answer, tools)
    except _WrongCallError as e:
        return Calls(error=str(e))
    if len(calls) > MAX_CALLS:
        return Calls(error=f"{len(calls)} calls in one turn, expected at most {MAX_CALLS}")
    for call in calls:
        if call.name not in tools:
            return Calls(error=f"there is no tool {call.name[:100]!r}; there are {', '.join(tools)}")
    return Calls(calls=tuple(calls))


class _WrongCallError(Exception):
    """Error message for the model."""


def _hermes(text: str, tools: Collection[str]) -> list[ToolCall]:
    """Parses any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen)."""
    del tools
    calls: list[ToolCall] = []
    at = 0
    while opening := _OPENING.search(text, at):
        begin = _FENCE.match(text, opening.end()).end()  # pyright: ignore[reportOptionalMemberAccess]  # matches nothing
        rest = text[begin:]
        # Decoded before the closing tag is searched, because string arguments may contain tags.
        try:
            value, size = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as e:  # RecursionError: deep nesting
            if _CLOSING.search(rest) is None:
                raise _WrongCallError("a call that begins with <tool_call> does not end with </tool_call>") from e
            raise _WrongCallError(f"a call is not JSON: {_said(e)}") from e
        closing = _AFTER_JSON.match(text, begin + size)
        if closing is None:
            raise _WrongCallError("a call that begins with <tool_call> does not end with </tool_call> behind its JSON")
        calls += _calls_of(value, "arguments")
        at = closing.end()
    return calls


def _llama3(text: str, tools: Collection[str]) -> list[ToolCall]:
    """Parses `{"name": ..., "parameters": {...}}` or a list of them (Llama 3).

    After `<|python_tag|>`, or at the start of the text, all of it must be calls. Elsewhere objects that name one of
    `tools` are calls and the rest is text.
    """
    before, tag, body = text.partition("<|python_tag|>")
    if tag:
        return _all_json(body.strip())
    stripped = _unfenced(before.strip())
    if re.match(r'\{\s*"name"', stripped):
        return _all_json(stripped)
    return [call for value in _objects(text, tools) for call in _calls_of(value, "parameters")]


def _all_json(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    while text:
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError) as e:
            raise _WrongCallError(f"a call is not JSON: {_said(e)}") from e
        calls += _calls_of(value, "parameters")
        text = re.sub(r"\A[\s;,]+", "", text[end:])
    return calls


def _tag(text: str, tools: Collection[str]) -> list[ToolCall]:
    """Parses any number of `<tool>input</tool>`; the enclosed text, tags included, is the argument `input`."""
    opening = re.compile(rf"<\s*({'|'.join(map(re.escape, tools))})\s*>") if tools else re.compile(r"(?!)")
    calls: list[ToolCall] = []
    at = 0
    while found := opening.search(text, at):
        name = found.group(1)
        closing = re.compile(rf"<\s*/\s*{re.escape(name)}\s*>").search(text, found.end())
        if closing is None:
            raise _WrongCallError(f"a call that begins with <{name}> does not end with </{name}>")
        calls.append(ToolCall(name=name, arguments={"input": text[found.end() : closing.start()].strip()}))
        at = closing.end()
    return calls


PARSERS: dict[str, Callable[[str, Collection[str]], list[ToolCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "tag": _tag,
}
_FORMS = {
    "hermes": '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    "llama3": '{"name": ..., "parameters": {...}}',
    "tag": "<TOOL>input</TOOL>",
}
_OPENING = re.compile(r"<\s*tool_call\s*>", re.IGNORECASE)
_CLOSING = re.compile(r"<\s*/\s*tool_call\s*>", re.IGNORECASE)
_AFTER_JSON = re.compile(r"\s*(?:```\s*)?<\s*/\s*tool_call\s*>", re.IGNORECASE)
_FENCE = re.compile(r"\s*(?:```\w*)?\s*")
_WHOLE_FENCE = re.compile(r"```\w*(.*?)```", re.DOTALL)
_DECODER = json.JSONDecoder()
_MAX_FAILURES = 64
"""Maximum failed JSON decodes; the rest of such a text is not searched."""
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "type", "id", "index", *_ARGUMENTS}
"""Keys that a call may have."""
_ARGUMENT_LIKE = {*_ARGUMENTS, "args", "kwargs", "params", "input", "inputs"}
_OTHER_MARKS = re.compile(
    r"</?\s*(?:tool_?calls?|function_?calls?|tool_code|tools?_use|invoke|function)\b[^<>\n]{0,100}>|\[TOOL_?CALLS?\]"
    r"|<[|\uff5c]\s*(?:python_tag|tool[_\u2581]?calls?\w*)[^<>]{0,40}>|\bfunctools\s*\[",
    re.IGNORECASE,
)
"""Call delimiters of other models' formats."""


def _refuse_other_forms(parser: str, text: str, tools: Collection[str]) -> list[ToolCall]:
    """Returns no calls; raises _WrongCallError if the text has a call in another form than the parser's."""
    names = "|".join(map(re.escape, tools)) or r"(?!)"
    alone = _unfenced(text.strip())
    others = (
        _OTHER_MARKS.search(text),
        re.search(rf"<\s*(?:/\s*)?(?:{names})(?:\s+\w+\s*=[^<>\n]{{0,200}}|\s*(?:/\s*)?)>", text, re.IGNORECASE),
        re.search(rf"""["'](?:name|function|tool|tool_name|action)["']\s*:\s*["'](?:{names})["']""", text),
        re.match(rf"(?:print\s*\(|\[)?\s*(?:{names})\s*(?:\.\w+\s*)?\(", alone),
        re.search(r"^[ \t*#]*Action[ \t*]*:.*\n\s*[*#]*Action[ \t]+Input[ \t*]*:", text, re.IGNORECASE | re.MULTILINE),
        next(_objects(text, tools), None),
    )
    if any(found is not None for found in others):
        raise _WrongCallError(f"a call must be written as {_FORMS[parser]}, with nothing else in it")
    return []


def _unfenced(text: str) -> str:
    fenced = _WHOLE_FENCE.fullmatch(text)
    return fenced.group(1).strip() if fenced else text


def _objects(text: str, tools: Collection[str]) -> Iterator[Any]:
    """Yields the JSON objects and lists in a text that look like calls."""
    at = num_failures = 0
    while num_failures < _MAX_FAILURES and (found := re.compile(r"[{\[]").search(text, at)):
        try:
            value, at = _DECODER.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            at, num_failures = found.end(), num_failures + 1
            continue
        if any(_is_call_like(one, tools) for one in (value if isinstance(value, list) else [value])):
            yield value


def _is_call_like(value: Any, tools: Collection[str]) -> bool:
    if not isinstance(value, dict):
        return False
    function = value.get("function")
    inner = function if isinstance(function, dict) else value
    name = inner.get("name", function)
    return isinstance(name, str) and (name in tools or bool({str(k).lower() for k in inner} & _ARGUMENT_LIKE))


def _calls_of(value: Any, field: str) -> list[ToolCall]:
    """Returns the calls of a JSON object or list of objects."""
    return [_call_of(one, field) for one in (value if isinstance(value, list) and value else [value])]


def _call_of(value: Any, field: str) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict) and set(value) <= {"function", "type", "id"}:
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _WrongCallError(f'a call must be {{"name": ..., "{field}": {{...}}}}')
    name = value["name"][:100]
    if other := sorted(set(value) - _BESIDE):
        wrong = other[0][:100]
        raise _WrongCallError(f'a call of {name!r} must have its arguments in "{field}", got the key {wrong!r}')
    given = [key for key in _ARGUMENTS if key in value]
    if len(given) > 1:
        raise _WrongCallError(f'a call of {name!r} must have its arguments in "{field}" alone')
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):  # OpenAI's API encodes arguments as a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise _WrongCallError(f'"{given[0]}" of a call of {name!r} must be a JSON object')
    return ToolCall(name=value["name"], arguments=arguments)


def _said(error: Exception) -> str:
    return str(error)[:200]
