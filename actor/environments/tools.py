"""Tool calls in what a model wrote, by named parsers: text in, calls out, or what is wrong with them. Pure.

A model may write anything: nothing here raises by it. What is wrong is said in a sentence that it is to read.
"""

import dataclasses
import json
from collections.abc import Callable, Collection
from typing import Any

MAX_CALLS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a turn asks for."""

    calls: tuple[ToolCall, ...] = ()
    """In order; none where the turn has none, or where one of them is wrong."""
    error: str = ""
    """What is wrong with a call."""


def parse(parser: str, text: str, tools: Collection[str]) -> Calls:
    """The calls in a text.

    Args:
      parser: one of `PARSERS`.
      text: a turn, special tokens as text.
      tools: the names that may be called.

    Raises:
      ValueError: no such parser.
    """
    if parser not in PARSERS:
        raise ValueError(f"no parser of tool calls {parser!r}; there are {', '.join(PARSERS)}")
    try:
        calls = PARSERS[parser](text, tools)
    except _WrongCallError as e:
        return Calls(error=str(e))
    if len(calls) > MAX_CALLS:
        return Calls(error=f"{len(calls)} calls in one turn, at most {MAX_CALLS} may be")
    for call in calls:
        if call.name not in tools:
            return Calls(error=f"there is no tool {call.name[:100]!r}; there are {', '.join(tools)}")
    return Calls(calls=tuple(calls))


class _WrongCallError(Exception):
    """Says to the model what is wrong."""


def _hermes(text: str, tools: Collection[str]) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes, Qwen)."""
    del tools
    return [_call_of(_json(body), "arguments") for _, body in _between(text, "<tool_call>", "</tool_call>")]


def _llama3(text: str, tools: Collection[str]) -> list[ToolCall]:
    """`{"name": ..., "parameters": {...}}`, alone or behind `<|python_tag|>`, several parted by ";" (Llama 3)."""
    del tools
    before, tag, body = text.partition("<|python_tag|>")
    body = (body if tag else before).strip()
    if not tag and not body.startswith('{"name"'):
        return []
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as e:
            raise _WrongCallError(f"a call is not JSON: {_said(e)}") from e
        calls.append(_call_of(value, "parameters"))
        body = body[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _tag(text: str, tools: Collection[str]) -> list[ToolCall]:
    """`<tool>input</tool>`, any number of them; the text between is the argument `input`."""
    found = [
        (at, ToolCall(name=tool, arguments={"input": body.strip()}))
        for tool in tools
        for at, body in _between(text, f"<{tool}>", f"</{tool}>")
    ]
    return [call for _, call in sorted(found, key=lambda pair: pair[0])]


PARSERS: dict[str, Callable[[str, Collection[str]], list[ToolCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "tag": _tag,
}


def _between(text: str, opening: str, closing: str) -> list[tuple[int, str]]:
    """What stands between each opening and the closing that follows it, and where."""
    bodies: list[tuple[int, str]] = []
    at = text.find(opening)
    while at >= 0:
        end = text.find(closing, at + len(opening))
        if end < 0:
            raise _WrongCallError(f"a call that begins with {opening} does not end with {closing}")
        bodies.append((at, text[at + len(opening) : end]))
        at = text.find(opening, end + len(closing))
    return bodies


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:  # the latter for a thousand brackets
        raise _WrongCallError(f"a call is not JSON: {_said(e)}") from e


def _call_of(value: Any, field: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _WrongCallError(f'a call must be {{"name": ..., "{field}": {{...}}}}')
    arguments = value.get(field, {})
    if not isinstance(arguments, dict):
        raise _WrongCallError(f'"{field}" of a call of {value["name"][:100]!r} must be a JSON object')
    return ToolCall(name=value["name"], arguments=arguments)


def _said(error: Exception) -> str:
    return str(error)[:200]
