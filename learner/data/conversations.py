"""Conversations in rows: message lists, or JSON text of them, validated and brought into one form."""

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from bridge.text.chat_template import JsonObject

MEDIA_PREFIXES = ("image", "video", "audio", "pixel")
"""Name prefixes of columns and message fields that hold media, which models here cannot read."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_OTHER_PARTS = frozenset({"thinking", "reasoning"})
"""Content part types without a `text` field that a template may support."""
_ROLE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_NAMES_A_ROLE = re.compile(r"""["'](role|from)\\*["']\s*:""")
_IS_ARRAY = re.compile(r"\s*(?:np\.|numpy\.)?array\(\s*(?=\[)")
_BETWEEN = re.compile(r"\}\s*\n\s*\{")
"""Boundary between two objects in numpy's printed form of an array."""
_LISTS = ("messages", "conversations", "conversation")
_MAX_ENCODINGS = 4
"""Maximum depth of nested JSON encoding (JSON text of JSON text) that is decoded."""


class NotARowError(ValueError):
    """Reason why a row is invalid, as the quarantine file records it."""


def read_prompt(
    prompt: Any, field: str, *, ignored: Collection[str] = (), is_whole: bool = False
) -> tuple[str, tuple[JsonObject, ...]]:
    """Returns (question, messages); messages is empty if the prompt is plain text.

    A prompt is text, a message, a list of messages, or JSON text of a message or list. Message fields in `ignored` are
    dropped. If `is_whole`, the last message may be the assistant's tool calls, as in a supervised conversation. Raises
    NotARowError if the prompt has another type, has no text, or contains media.
    """
    if isinstance(prompt, str):
        _check_unicode(prompt, field)
        found = _from_json(prompt, field)
        if found is None:
            if not prompt.strip():
                raise NotARowError(f"{field!r} is empty")
            return prompt, ()
        prompt = found
    if isinstance(prompt, dict):
        prompt = _within_object(prompt, field)
        prompt = [prompt] if isinstance(prompt, dict) else prompt
    if not isinstance(prompt, list) or not prompt:
        raise NotARowError(f"{field!r} must be text or a list of messages, got {type(prompt).__name__}")
    messages = tuple(_message(m, field, ignored) for m in prompt)
    if not asked_text(messages).strip():
        raise NotARowError(f"{field!r} is empty: no message has text")
    if not is_whole and (messages[-1].get("tool_calls") or messages[-1].get("function_call")):
        raise NotARowError(f"{field!r} must not end with tool calls without tool results")
    return "\n".join(map(text_of, messages)), messages


def read_tools(tools: Any, field: str) -> tuple[JsonObject, ...]:
    """Returns the JSON schemas of a row's tools, or raises NotARowError if they are not a list of objects."""
    found = _list_of_objects(tools)
    if found is None:
        raise NotARowError(f"{field!r} must be a list of tools, each a JSON schema, got {short(tools)}")
    _check_unicode(json.dumps(found, ensure_ascii=False), field)
    return tuple(found)


def is_media(name: str, value: Any) -> bool:
    """Returns True if a column or field holds media or their paths. A number, such as an image count, is not media."""
    return name.startswith(MEDIA_PREFIXES) and bool(value) and not isinstance(value, int | float)


def text_of(message: Mapping[str, Any]) -> str:
    """Returns the text of a message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(p.get("text", "") for p in content if isinstance(p.get("text", ""), str))
    return content or ""


def asked_text(messages: Sequence[JsonObject]) -> str:
    """Returns the text of a conversation without system messages, or all of it if there are no others."""
    asked = [m for m in messages if m["role"] not in ("system", "developer")] or messages
    return "\n".join(map(text_of, asked))


def _from_json(text: str, field: str) -> list[Any] | None:
    """Returns the messages in JSON text, which may be encoded several times; None for other text."""
    if not (text.lstrip()[:1] in ("[", "{", '"') or _IS_ARRAY.match(text)) or not _NAMES_A_ROLE.search(text):
        return None
    found: Any = text
    for _ in range(_MAX_ENCODINGS):
        if not isinstance(found, str):
            break
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            if _as_messages(_literal(found), field) is not None:
                said = f"{field!r} is a conversation as Python or numpy prints it; write it as JSON"
                raise NotARowError(said) from None
            return None  # plain text that looks like JSON, such as a question about JSON or a program
    return _as_messages(found, field)


def _as_messages(value: Any, field: str) -> list[Any] | None:
    """Returns `value` as a list of messages, or None if it is not one."""
    found: Any = _within_object(value, field)
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not found or not all(isinstance(m, dict) for m in found):
        return None
    messages = cast(list[JsonObject], found)
    if not all(isinstance(m.get("role", m.get("from")), str) for m in messages):
        return None
    says = any(m.keys() & {"content", "value", "tool_calls", "function_call"} for m in messages)
    return found if says or next(iter(messages[0])) == "role" else None


def _within_object(value: Any, field: str) -> Any:
    """Returns the message list of {messages: [...]}, or `value`; raises NotARowError if other fields have values."""
    name = next((n for n in _LISTS if isinstance(value, dict) and isinstance(value.get(n), list)), "")
    if not name or _as_messages(value[name], field) is None:
        return value
    if others := [k for k, v in value.items() if k != name and v not in (None, "", [], {})]:
        raise NotARowError(
            f"{field!r}: expected only {name}, got also {short(others[0])}; move it to a separate column"
        )
    return value[name]


def _literal(text: str) -> Any:
    """Returns the value that Python or numpy prints as the text, or None."""
    text = text.strip()
    if array := _IS_ARRAY.match(text):
        text = text[array.end() :].removesuffix(")").rstrip()
        text = text.removesuffix("dtype=object").rstrip().removesuffix(",")
    text = _BETWEEN.sub("}, {", text)  # printed strings contain no raw newline, so this matches only between objects
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _message(given: Any, field: str, ignored: Collection[str]) -> JsonObject:
    if not isinstance(given, dict):
        raise NotARowError(f"{field!r}: every message needs a role and a content")
    message = {k: v for k, v in cast(JsonObject, given).items() if v is not None and k not in ignored}
    role, content = message.get("role"), message.get("content")
    for name in ("tool_calls", "function_call"):
        if message.get(name) in ([], {}, "", "[]"):
            del message[name]
    calls = "tool_calls" in message or "function_call" in message
    if not isinstance(role, str) or (content is None and not calls):
        raise NotARowError(f"{field!r}: every message needs a role and a content")
    if not _ROLE.fullmatch(role):
        raise NotARowError(f"{field!r}: a role must consist of letters, digits, _, ., : and -, got {short(role)}")
    if content is not None and not isinstance(content, str | list):
        raise NotARowError(f"{field!r}: every message needs a role and a content, text or parts of text")
    if media := [n for n in message if is_media(n, message[n])]:
        raise NotARowError(
            f"{field!r}: a message of role {role} has {media[0]}, and only text is read; remove it, or set "
            f"prompts.ignored_fields={','.join(media)}"
        )
    message["content"] = [_part(p, field) for p in content] if isinstance(content, list) else content
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], field, ignored)
    _check_unicode(json.dumps(message, ensure_ascii=False), field)
    return message


def _part(given: Any, field: str) -> JsonObject:
    """Returns a content part, or raises NotARowError unless it is text or reasoning."""
    if isinstance(given, str):
        return {"type": "text", "text": given}
    part = {k: v for k, v in cast(JsonObject, given).items() if v is not None} if isinstance(given, dict) else {}
    kind = part.get("type", "text")
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return part | {"type": "text"}
    if kind in _OTHER_PARTS:
        return part
    raise NotARowError(f"{field!r}: content parts must be text (only text is read), got {short(given)}")


def _calls(given: Any, field: str, ignored: Collection[str]) -> list[JsonObject]:
    calls = _list_of_objects(given)
    if calls is None:
        raise NotARowError(f"{field!r}: tool_calls must be a list of {{function: {{name, arguments}}}}")
    found: list[JsonObject] = []
    for call in calls:
        call = {k: v for k, v in call.items() if v is not None}
        if "tool_call_id" in ignored:
            call.pop("id", None)
        if isinstance(call.get("function"), dict):
            call["function"] = {k: v for k, v in call["function"].items() if v is not None}
        if not isinstance(call.get("function", call).get("name"), str):
            raise NotARowError(f"{field!r}: a tool call needs a function with a name, got {short(call)}")
        found.append(call)
    return found


def _list_of_objects(given: Any) -> list[JsonObject] | None:
    found: Any = given
    try:
        found = json.loads(given) if isinstance(given, str) else given
        found = [json.loads(x) if isinstance(x, str) else x for x in found] if isinstance(found, list) else [found]
    except (ValueError, RecursionError):
        return None
    return found if all(isinstance(x, dict) for x in found) else None


def _check_unicode(text: str, field: str) -> None:
    if not is_unicode(text):
        raise NotARowError(f"{field!r} must be valid Unicode text")


def is_unicode(text: str) -> bool:
    """Returns False if the text has an unpaired surrogate, which JSON allows but hashes and tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: Any) -> str:
    """Returns the value's `repr` in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
