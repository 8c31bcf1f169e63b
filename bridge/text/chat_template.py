"""Rendering of messages with a model's chat template, shared by both sides.

The learner renders prompts and an actor renders environment messages. A run is correct only if both render alike.
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jinja2

from bridge.text import template_files

Message = dict[str, str]
"""Chat message with `role` and `content`."""
JsonObject = dict[str, Any]
Conversation = Sequence[Mapping[str, Any]]
"""Messages as a template accepts them: a content may also be a list of parts, or None next to tool calls."""

DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of templates in a model with several: for any conversation, and for one with tools."""
RENDERED = frozenset({"messages", "tools", "add_generation_prompt", "strftime_now", "raise_exception"})
"""Variables that rendering sets, which template arguments must not override."""
PROMPT_TEMPLATE = "prompt_template"
"""Field of an episode's row with the tools and template arguments of its prompt."""
_STAND_IN = "Sluicestandin"


def today() -> str:
    """Returns today's UTC date as YYYY-MM-DD."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSettings:
    """Template settings of a run, which must be equal on the learner and all actors."""

    name: str = ""
    """Name of the template in a model with several; empty: chosen per conversation."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=JsonObject)
    """Template variables, such as enable_thinking."""
    date: str = dataclasses.field(default_factory=today)
    """Date that `strftime_now` returns, YYYY-MM-DD."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """Chat template of a Hugging Face folder, or its templates by name."""

    folder: pathlib.Path
    source: str
    """Jinja source for conversations without tools; empty if the folder has no template, or several and none is
    chosen."""
    special_tokens: Mapping[str, str]
    """Special tokens that the template may name, such as bos_token, eos_token, pad_token and unk_token."""
    named: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Jinja sources by name, if the folder has several templates."""
    settings: TemplateSettings = dataclasses.field(default_factory=TemplateSettings)

    @property
    def exists(self) -> bool:
        """True if the folder has a template."""
        return bool(self.source or self.named)

    def source_for(self, *, tools: bool) -> str:
        """Returns the Jinja source; raises ValueError if the folder has no template, or several and none is chosen."""
        if tools and not self.settings.name and FOR_TOOLS in self.named:
            return self.named[FOR_TOOLS]
        if self.source:
            return self.source
        if self.named:
            raise ValueError(
                f"{self.folder} has the chat templates {', '.join(sorted(self.named))} but none named "
                f"{DEFAULT}; set prompts.template_name to one of them, or prompts.chat_template=off"
            )
        raise ValueError(f"{self.folder} has no chat template; set prompts.chat_template=off")

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError if no template of the folder reads an argument, or rendering sets it."""
        try:
            read = [template_files.variables(s) for s in {self.source, *self.named.values()}]
        except jinja2.TemplateError as e:
            raise self._refused(e) from e
        wrong = [n for n in arguments if n in RENDERED or not any(n in v for v in read)]
        if wrong:
            raise ValueError(
                f"chat template of {self.folder}: unknown argument {', '.join(wrong)}; remove it from "
                "prompts.template_arguments, or from the row"
            )

    def render(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders messages in the model's chat format.

        Some templates need another form of the messages. If a template fails on a list of parts, its texts are joined.
        If a template fails on text arguments of a tool call, or quotes them again, they become an object, and vice
        versa. If a template writes "None" for the content of a message with only tool calls, the content becomes "".

        Raises ValueError if the folder has no chat template, or the template rejects the messages.

        Args:
          messages: the conversation.
          add_generation_prompt: end with the beginning of the assistant's next message.
          continue_final_message: end within the last message, so that the assistant continues it.
          tools: JSON schemas of callable tools.
          arguments: template variables, which override the settings.
        """
        source = self.source_for(tools=bool(tools))
        given = {**self.settings.arguments, **(arguments or {})}
        self.check_arguments(given)
        variables = {
            "tools": [*map(dict, tools)] if tools else None,  # always set, because templates compare it with none
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "strftime_now": functools.partial(_strftime, self.settings.date),
            **self.special_tokens,
            **given,
        }
        conversation = [dict(m) for m in messages]
        if not _takes_text(source, self.settings.date, tuple(sorted(self.special_tokens.items()))):
            conversation = [_as_parts(m) for m in conversation]
        if not continue_final_message:
            return self._first(source, conversation, variables)
        stand_in = _stand_in(conversation)
        text = self._first(source, _with_end(conversation, f"{stand_in} "), variables)
        before, found, behind = text.rpartition(stand_in)
        if not found or _last_text(conversation).strip() not in text:
            raise ValueError(
                f"chat template of {self.folder}: it changes the last message, so the assistant cannot continue it"
            )
        return before if behind.startswith(" ") else before.rstrip()

    def _first(self, source: str, messages: list[JsonObject], variables: Mapping[str, Any]) -> str:
        refusal: Exception | None = None
        quoted = ""
        for form in _forms(messages):
            try:
                text = template_files.compiled(source).render(messages=form, **variables)
            except Exception as e:  # the model's template may raise any exception
                refusal = refusal or e
                continue
            if any(json.dumps(a, ensure_ascii=False) in text for a in _text_arguments(form)):
                quoted = quoted or text
                continue  # JSON within JSON: the template writes the arguments as JSON itself
            blank = [m | {"content": ""} if m.get("content", "") is None else m for m in form]
            if blank != form and "None" in text:
                empty = template_files.compiled(source).render(messages=blank, **variables)
                return empty if empty.count("None") < text.count("None") else text
            return text
        if quoted:
            return quoted
        raise self._refused(refusal) from refusal

    def _refused(self, error: Exception | None) -> ValueError:
        said = " ".join(str(error).split())
        kind = "" if isinstance(error, jinja2.TemplateError) or error is None else f"{type(error).__name__}: "
        return ValueError(f"the chat template of {self.folder} refuses the messages: {kind}{said}")


def read_chat_template(folder: pathlib.Path, settings: TemplateSettings | None = None) -> ChatTemplate:
    """Reads the templates of a Hugging Face folder from all files that may hold them (`bridge.text.template_files`).

    Raises ValueError if a file is corrupt, or no template has the name in the settings.
    """
    settings = settings or TemplateSettings()
    found = template_files.read_templates(folder)
    if settings.name and settings.name not in found:
        there = f"it has {', '.join(sorted(found))}" if found else "it has none"
        raise ValueError(f"prompts.template_name: {folder} has no chat template {settings.name!r}; {there}")
    chosen = settings.name or (DEFAULT if DEFAULT in found else next(iter(found)) if len(found) == 1 else "")
    return ChatTemplate(
        folder=folder,
        source=found.get(chosen, ""),
        special_tokens=template_files.read_special_tokens(folder),
        named=found if len(found) > 1 else {},
        settings=settings,
    )


def asks_of(messages: Conversation, *, tools: Conversation, arguments: Mapping[str, Any]) -> JsonObject:
    """Returns the row fields of an episode's prompt, with which an actor renders the following messages alike."""
    extra = {"tools": [*map(dict, tools)], "arguments": {**arguments}}
    return {"messages": [*map(dict, messages)]} | ({PROMPT_TEMPLATE: extra} if tools or arguments else {})


def _strftime(date: str, form: str) -> str:
    return datetime.datetime.fromisoformat(date).strftime(form)


def _forms(messages: list[JsonObject]) -> Iterator[list[JsonObject]]:
    """Yields the messages as given, followed by alternative forms for templates that need them."""
    seen: list[list[JsonObject]] = []
    for form, other in itertools.product((messages, [_joined(m) for m in messages]), (False, True)):
        swapped = [_with_other_arguments(m) for m in form] if other else form
        if swapped not in seen:
            seen.append(swapped)
            yield [m | {"content": _Parts(m["content"])} if isinstance(m.get("content"), list) else m for m in swapped]


class _Parts(list[Any]):
    """List of content parts that raises TypeError if a template writes it as text."""

    def __str__(self) -> str:
        raise TypeError("content: expected text, got a list of parts")


def _parts_of(message: Mapping[str, Any]) -> list[JsonObject] | None:
    content = message.get("content")
    return cast(list[JsonObject], content) if isinstance(content, list) else None


def _as_parts(message: JsonObject) -> JsonObject:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _joined(message: JsonObject) -> JsonObject:
    parts = _parts_of(message)
    if parts is None or not all(isinstance(p.get("text"), str) for p in parts):
        return message
    return message | {"content": "".join(p["text"] for p in parts)}


def _functions(message: Mapping[str, Any]) -> Iterator[JsonObject]:
    """Yields the function calls of a message that have arguments."""
    for call in cast(list[JsonObject], message.get("tool_calls") or []):
        function: JsonObject = call.get("function", call)
        if "arguments" in function:
            yield function


def _text_arguments(messages: list[JsonObject]) -> list[str]:
    found = [f["arguments"] for m in messages for f in _functions(m)]
    return [a for a in found if isinstance(a, str) and a]


def _with_other_arguments(message: JsonObject) -> JsonObject:
    """Returns the message with tool call arguments converted from JSON text to objects, or vice versa."""
    if not message.get("tool_calls"):
        return message
    message = copy.deepcopy(message)
    for function in _functions(message):
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            continue
        with contextlib.suppress(ValueError):  # what the model wrote was no JSON
            function["arguments"] = json.loads(arguments)
    return message


def _stand_in(messages: list[JsonObject]) -> str:
    word, text = _STAND_IN, repr(messages)
    while word in text:
        word += "x"
    return word


def _with_end(messages: list[JsonObject], end: str) -> list[JsonObject]:
    *others, last = copy.deepcopy(messages)
    parts = _parts_of(last)
    if parts is not None:
        part = next((p for p in reversed(parts) if isinstance(p.get("text"), str)), None)
        if part is None:
            raise ValueError("the last message has no text that the assistant could continue")
        part["text"] += end
    else:
        last["content"] = f"{last.get('content') or ''}{end}"
    return [*others, last]


def _last_text(messages: list[JsonObject]) -> str:
    parts = _parts_of(messages[-1])
    if parts is not None:
        return next((p["text"] for p in reversed(parts) if isinstance(p.get("text"), str)), "")
    return messages[-1].get("content") or ""


@functools.cache
def _takes_text(source: str, date: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Returns False for a template that shows a message only as a list of parts, as some vision models do."""

    def shows(content: Any) -> bool:
        try:
            text = template_files.compiled(source).render(
                messages=[{"role": "user", "content": content}],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                strftime_now=functools.partial(_strftime, date),
                **dict(special_tokens),
            )
        except Exception:  # nothing is known about a template that needs other messages
            return False
        return _STAND_IN in text

    return shows(_STAND_IN) or not shows([{"type": "text", "text": _STAND_IN}])
