"""A model's chat template: messages to text, the same on both sides.

The learner renders prompts and an actor what environments say; a run is right only if both do it alike.
"""

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

Message = dict[str, str]
"""`role` and `content`."""

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The template of a Hugging Face folder."""

    folder: pathlib.Path
    source: str
    """Jinja; empty when the folder has none."""
    special_tokens: Mapping[str, str]
    """What the template may name: bos_token, eos_token, pad_token, unk_token."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Messages in the model's chat format, with the generation prompt up to where the assistant begins to speak.

        Raises:
          ValueError: the folder has no chat template, or the template refuses the messages.
        """
        if not self.source:
            raise ValueError(f"{self.folder} has no chat template; set prompts.chat_template=off")
        try:
            return _compiled(self.source).render(
                messages=list(messages),
                tools=None,  # set, since templates compare it with none
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except jinja2.TemplateError as e:
            raise ValueError(f"the chat template of {self.folder} refuses the messages: {e}") from e


def read_chat_template(folder: pathlib.Path) -> ChatTemplate:
    """Reads chat_template.jinja or tokenizer_config.json.

    Raises:
      ValueError: a file is damaged.
    """
    settings = _read_settings(folder / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL if (text := _token_text(settings.get(name))) is not None}
    return ChatTemplate(folder=folder, source=_source(folder, settings), special_tokens=special)


def _source(folder: pathlib.Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template: str | list[dict[str, str]] = settings.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        return next((t["template"] for t in template if t["name"] == "default"), "")
    return template


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _read_settings(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise ValueError(f"{file} is not JSON: {e}") from e


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    """A template in the environment that transformers gives it (`_compile_jinja_template`)."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(fmt: str) -> str:
        return datetime.datetime.now().strftime(fmt)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson  # pyright: ignore[reportUnknownMemberType]
    env.globals["raise_exception"] = raise_exception  # pyright: ignore[reportUnknownMemberType]
    env.globals["strftime_now"] = strftime_now  # pyright: ignore[reportUnknownMemberType]
    return env.from_string(template)
