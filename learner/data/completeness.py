"""Check that a chat template renders every part of a conversation.

Each text of the conversation is replaced by a unique marker word, and each marker must appear in the rendered prompt.
"""

import copy
import functools
import json
from collections.abc import Sequence
from typing import Any

from bridge.text import template_files
from bridge.text.chat_template import ChatTemplate, JsonObject

_CHECKED_BY_WORDS = ("role", "content", "tool_calls", "prefix")
"""Fields that the marker words check, and `prefix`, which marks a message to continue (Mistral). Any other field must
change the rendered text."""
MAY_BE_DROPPED = ("reasoning_content", "reasoning", "thinking", "tool_plan")
"""Reasoning fields. Templates drop them from earlier turns on purpose, so only their names are checked."""
NOTHING = ("", [], {})
"""Field values that count as absent."""


def check_complete(
    chat: ChatTemplate,
    messages: Sequence[JsonObject],
    *,
    tools: Sequence[JsonObject] = (),
    arguments: JsonObject | None = None,
    continues: bool = False,
) -> None:
    """Raises ValueError if the template leaves out a message, a message field, a tool call or a tool.

    `arguments` are the row's template variables; with `continues` the assistant continues the last message.
    """
    shape = {
        "messages": _shapes(messages),
        "tools": [_tool_shape(i, t) for i, t in enumerate(tools)],
        "arguments": arguments or {},
        "continues": continues,
    }
    if missing := _missing(_Key(chat), json.dumps(shape, sort_keys=True, default=str)):
        raise ValueError(f"the chat template of {chat.folder} leaves out {missing}")


class _Key:
    """Cache key that compares templates by identity, because their mappings are not hashable."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.chat = chat

    def __hash__(self) -> int:
        return id(self.chat)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.chat is self.chat


@functools.lru_cache(4096)
def _missing(key: _Key, shape: str) -> str:
    chat, given = key.chat, json.loads(shape)
    messages: list[JsonObject] = given["messages"]
    tools: list[JsonObject] = given["tools"]

    def text(of: list[JsonObject]) -> str:
        continues = given["continues"]
        return chat.render(
            of,
            tools=tools,
            arguments=given["arguments"],
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    def same(changed: list[JsonObject]) -> bool:
        try:
            return text(changed) == whole
        except ValueError:  # the template requires the removed field
            return False

    try:
        whole = text(messages)
    except ValueError:
        return ""  # The template rejects the marker words, so this check cannot tell anything about the real texts.
    for i, tool in enumerate(tools):
        if _word("tool", i) not in whole:
            return f"the row's tools ({tool.get('type', 'function')} {i + 1}); remove them, or take another template"
    known = template_files.names(chat.source_for(tools=bool(tools)))
    fields: dict[str, str] = {}
    for i, message in enumerate(messages):
        said = f"message {i + 1} (role {message['role']})"
        if any(word not in whole for word in _content_words(message)):
            return f"{said}; remove it, or take another template"
        counts = [n for n, v in message.items() if n not in (*_CHECKED_BY_WORDS, *MAY_BE_DROPPED) and v not in NOTHING]
        fields |= {n: said for n in counts if same(_without(messages, i, n))}
        fields |= {n: said for n in MAY_BE_DROPPED if n in message and n not in known}
        for n, call in enumerate(message.get("tool_calls", ())):
            if any(word not in whole for word in _words_of(call)):
                return f"a tool call of {said}; remove it, or take another template"
            if "id" in call and same(_without(messages, i, "id", call=n)):
                fields["tool_call_id"] = said
    listed = ", ".join(f"{name} of {said}" for name, said in fields.items())
    return f"{listed}; remove it, or set prompts.ignored_fields={','.join(fields)}" if fields else ""


def _without(messages: list[JsonObject], i: int, name: str, *, call: int | None = None) -> list[JsonObject]:
    changed = copy.deepcopy(messages)
    del (changed[i] if call is None else changed[i]["tool_calls"][call])[name]
    return changed


def _content_words(shape: JsonObject) -> list[str]:
    content = shape.get("content")
    texts = [p.get("text", "") for p in content] if isinstance(content, list) else [content or ""]
    return [text for text in texts if text.strip()]


def _words_of(call: JsonObject) -> list[str]:
    function = call.get("function", call)
    given = function.get("arguments") or {}
    arguments = json.loads(given) if isinstance(given, str) else given
    return [function["name"], *(word for pair in arguments.items() for word in pair)]


def _shapes(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Returns the messages with marker words for texts. Ids keep their length, which templates may check."""
    ids: dict[str, str] = {}

    def id_of(given: str, function: str = "", word: str = "") -> str:
        # an id may contain the function's name
        named = given.replace(function, word) if function and function in given else ""
        return ids.setdefault(given, named or f"Sq{len(ids)}x".ljust(len(given), "q"))

    shapes: list[JsonObject] = []
    for i, message in enumerate(messages):
        shape = dict(message)
        content = message.get("content")
        if isinstance(content, list):
            shape["content"] = [
                p | {"text": _word("text", i, k)} if p.get("text", "").strip() else p for k, p in enumerate(content)
            ]
        elif content and content.strip():
            shape["content"] = _word("text", i)
        for name in ("name", *MAY_BE_DROPPED):
            if isinstance(message.get(name), str):
                shape[name] = _word(name, i)
        if isinstance(message.get("tool_call_id"), str):
            shape["tool_call_id"] = id_of(message["tool_call_id"])
        if "tool_calls" in message:
            shape["tool_calls"] = copy.deepcopy(message["tool_calls"])
        for n, call in enumerate(shape.get("tool_calls", ())):
            function, word = call.get("function", call), _word("function", i, n)
            if isinstance(call.get("id"), str):
                call["id"] = id_of(call["id"], function["name"], word)
            function["name"] = word
            given = function.get("arguments")
            words = {_word("argument", i, n): _word("value", i, n)} if given and given != "{}" else {}
            if given is not None:
                function["arguments"] = json.dumps(words) if isinstance(given, str) else words
        shapes.append(shape)
    return shapes


def _tool_shape(i: int, tool: JsonObject) -> JsonObject:
    shape = copy.deepcopy(tool)
    function = shape.get("function", shape)
    if isinstance(function, dict):
        function["name"] = _word("tool", i)
    return shape


def _word(*parts: Any) -> str:
    return "Sluice" + "x".join(map(str, parts)).replace("_", "") + "end"
