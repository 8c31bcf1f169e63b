"""The model folder's tokenizer, without torch: `tokenizers` for the text, jinja for the chat template."""

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers
from blake3 import blake3
from jaxtyping import Int32

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids, as the Hugging Face folder says."""

    folder: pathlib.Path
    backend: tokenizers.Tokenizer
    chat_template: str
    """Empty when the folder has none."""
    special_tokens: dict[str, str]
    stop_token_ids: tuple[int, ...]
    """End-of-sequence tokens of generation_config.json, config.json and tokenizer_config.json together."""
    fingerprint: str
    """Hash of tokenizer.json: what the learner and an actor must agree on."""

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Token ids of a text, with nothing added."""
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.backend.decode(list(map(int, tokens)), skip_special_tokens=True)

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has; on all cores, in a fraction of the time of as many `encode`."""
        return [len(e.ids) for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Messages in the model's chat format, with the generation prompt up to where the assistant begins to speak.

        Raises:
          ValueError: the folder has no chat template, or the template refuses the messages.
        """
        if not self.chat_template:
            raise ValueError(f"{self.folder} has no chat template; set prompts.chat_template=off")
        try:
            return _compiled(self.chat_template).render(
                messages=list(messages),
                tools=None,  # set, since templates compare it with none
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except jinja2.TemplateError as e:
            raise ValueError(f"the chat template of {self.folder} refuses the messages: {e}") from e


def load_tokenizer(folder: str | pathlib.Path, *, vocab_size: int) -> Tokenizer:
    """Reads a model folder's tokenizer and checks it against the model.

    Raises:
      ValueError: tokenizer.json is missing or unreadable, or it has ids that the model has no embedding for.
    """
    folder = pathlib.Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; save the tokenizer in its fast format "
            "(tokenizer.save_pretrained of a fast tokenizer writes it)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the Rust library raises plain Exception
        raise ValueError(f"{file} is no tokenizer: {e}") from e
    largest = max(backend.get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} does not match its model: it has token id {largest}, "
            f"the model's vocab_size is {vocab_size}"
        )
    settings = _read_json(folder / "tokenizer_config.json")
    special = {
        name: token
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := _token_text(settings.get(name))) is not None
    }
    stops = set()
    for source in ("generation_config.json", "config.json"):
        ids = _read_json(folder / source).get("eos_token_id")
        stops.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if "eos_token" in special:
        eos = backend.token_to_id(special["eos_token"])
        if eos is None:
            raise ValueError(
                f"{folder}: tokenizer_config.json names eos_token {special['eos_token']!r}, "
                "which tokenizer.json does not have"
            )
        stops.add(eos)
    if not stops:
        raise ValueError(f"{folder} names no end-of-sequence token in config.json or tokenizer_config.json")
    if max(stops) >= vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} does not match its model: end-of-sequence id {max(stops)}, "
            f"the model's vocab_size is {vocab_size}"
        )
    return Tokenizer(
        folder=folder,
        backend=backend,
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        stop_token_ids=tuple(sorted(stops)),
        fingerprint=blake3(file.read_bytes()).hexdigest(),
    )


def _chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t["name"] == "default"), "")
    return template


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _read_json(file: pathlib.Path) -> dict[str, Any]:
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

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
    return env.from_string(template)
