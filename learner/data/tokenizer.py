"""Tokenizer and prompt rendering: chat template, system prompt and BOS."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from blake3 import blake3
from jaxtyping import Int32

from bridge.text import text_tokens
from bridge.text.chat_template import (
    ChatTemplate,
    Conversation,
    JsonObject,
    TemplateSettings,
    asks_of,
    read_chat_template,
)
from bridge.text.template_files import read_json
from configs.sections import PromptsConfig
from learner.data.completeness import MAY_BE_DROPPED, NOTHING, check_complete
from learner.data.problem import Problem, RawProblem


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text tokenizer of a Hugging Face folder."""

    folder: pathlib.Path
    backend: tokenizers.Tokenizer
    chat: ChatTemplate
    stop_token_ids: tuple[int, ...]
    """Union of the end-of-sequence tokens of generation_config.json, config.json and tokenizer_config.json, and the
    token that ends a turn in the chat template."""
    fingerprint: str
    """Hash of tokenizer.json, which must match between learner and actors."""
    beginning: str = ""
    """Text of the tokens that the tokenizer prepends, such as BOS."""
    control: text_tokens.ControlTokens = text_tokens.ControlTokens(frozenset(), frozenset())
    """Texts that are control tokens."""
    beyond: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Added tokens by text whose ids have no embedding in the model; prompts must not contain them."""
    notes: tuple[str, ...] = ()
    """Disagreements between the folder's files, one line each."""

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Returns the token ids of a text, with nothing prepended."""
        return np.asarray(text_tokens.encode(self.backend, text), np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids with special tokens, as the model reads and writes it."""
        return self.backend.decode(list(map(int, tokens)), skip_special_tokens=False)

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens per text; a parallel batch, much faster than repeated `encode`."""
        return [len(ids) for ids in text_tokens.encode_batch(self.backend, texts)]

    def render_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns messages in the model's chat format; arguments as `bridge.text.chat_template.ChatTemplate.render`.

        Control tokens inside a message are text: `text_tokens.BREAK` splits them so that `encode` reads them as text.
        """
        return self.chat.render(
            self.control.as_text(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=self.control.values_as_text(tools),
            arguments=arguments,
        )


def load_tokenizer(
    folder: str | pathlib.Path, *, vocab_size: int, template: TemplateSettings | None = None
) -> Tokenizer:
    """Reads a model folder's tokenizer and checks it against the model.

    Added tokens beyond the model's vocabulary are allowed. The model cannot sample them, and `render` rejects prompts
    that contain one (`Tokenizer.beyond`).

    Raises ValueError if tokenizer.json is missing or unreadable, a base token or a stop token has no embedding in the
    model, or no file names an end-of-sequence token.
    """
    folder = pathlib.Path(folder)
    backend = text_tokens.read_tokenizer(folder)
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values())
    if any(i >= vocab_size for text, i in vocabulary.items() if text not in added):
        raise ValueError(
            f"the tokenizer of {folder} does not match its model: it has token id {largest}, "
            f"the model's vocab_size is {vocab_size}"
        )
    chat = read_chat_template(folder, template)
    named = _named_ends(folder, chat, backend)
    if not named:
        raise ValueError(f"{folder} names no end-of-sequence token in config.json or tokenizer_config.json")
    stops = {i for ids in named.values() for i in ids}
    if max(stops) >= vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} does not match its model: it has token id {largest}, end-of-sequence id "
            f"{max(stops)}, "
            f"the model's vocab_size is {vocab_size}"
        )
    settings = read_json(folder / "tokenizer_config.json")
    beginning = text_tokens.beginning(backend, settings, chat.special_tokens.get("bos_token", ""))
    notes = _disagreements(folder, chat, backend, named, beginning)
    end = text_tokens.turn_end(backend, chat, stops) if chat.exists else None
    if end is not None and end < vocab_size:
        said = ", ".join(f"{backend.id_to_token(i)!r} ({i})" for i in sorted(stops))
        notes.append(
            f"warning: the chat template of {folder} ends a turn with {backend.id_to_token(end)!r} ({end}), which is "
            f"none of the end-of-sequence tokens that its files name: {said}; generation stops at either"
        )
        stops.add(end)
    return Tokenizer(
        folder=folder,
        backend=backend,
        chat=chat,
        stop_token_ids=tuple(sorted(stops)),
        fingerprint=blake3((folder / "tokenizer.json").read_bytes()).hexdigest(),
        beginning=beginning,
        control=text_tokens.control_tokens(backend, chat if chat.exists else None, ends=stops),
        beyond={text: i for text, i in added.items() if i >= vocab_size},
        notes=tuple(notes),
    )


def _named_ends(folder: pathlib.Path, chat: ChatTemplate, backend: tokenizers.Tokenizer) -> dict[str, set[int]]:
    """Returns end-of-sequence ids by file, or raises ValueError if eos_token is not in the vocabulary."""
    named: dict[str, set[int]] = {}
    for source in ("generation_config.json", "config.json"):
        ids = read_json(folder / source).get("eos_token_id")
        if ids is not None and ids != []:
            named[source] = set(ids) if isinstance(ids, list) else {ids}
    if "eos_token" in chat.special_tokens:
        eos = backend.token_to_id(chat.special_tokens["eos_token"])
        if eos is None:
            raise ValueError(
                f"{folder}: tokenizer_config.json names eos_token {chat.special_tokens['eos_token']!r}, "
                "which tokenizer.json does not have"
            )
        named["tokenizer_config.json"] = {eos}
    return named


def _disagreements(
    folder: pathlib.Path,
    chat: ChatTemplate,
    backend: tokenizers.Tokenizer,
    named: Mapping[str, set[int]],
    beginning: str,
) -> list[str]:
    notes: list[str] = []
    of_model = {i for file, ids in named.items() if file != "tokenizer_config.json" for i in ids}
    of_tokenizer = named.get("tokenizer_config.json", set())
    if of_model and not of_tokenizer <= of_model:
        notes.append(
            f"warning: the files of {folder} disagree on the end of a sequence: "
            + "; ".join(f"{file} {sorted(ids)}" for file, ids in named.items())
            + "; generation stops at any of them"
        )
    bos = chat.special_tokens.get("bos_token")
    bos_id, of_config = backend.token_to_id(bos) if bos else None, read_json(folder / "config.json").get("bos_token_id")
    if bos_id is not None and isinstance(of_config, int) and of_config != bos_id:
        notes.append(
            f"warning: the files of {folder} disagree on the BOS token: config.json {of_config}, "
            f"tokenizer_config.json {bos!r} ({bos_id}); prompts have the latter, where they have one"
        )
    if chat.source and beginning:
        try:
            begun = chat.render([{"role": "user", "content": "x"}]).startswith(beginning)
        except ValueError:  # the template rejects this probe, so nothing can be checked
            begun = True
        if not begun:
            notes.append(
                f"warning: the tokenizer of {folder} puts {beginning!r} before a text, and its chat template does not; "
                "prompts have none, as with transformers.apply_chat_template"
            )
    return notes


def render(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> str:
    """Returns the prompt's text, for `Tokenizer.encode`.

    A conversation that ends with an assistant message is continued, so the text ends with that message. The text of an
    episode ends before the generation prompt, because the environment may add messages first.

    Raises ValueError if a chat template is required and missing, it rejects the messages or leaves out a part, or the
    prompt has a token without an embedding in the model.
    """
    messages = messages_of(raw, tokenizer, config)
    text = _chat(raw, messages, tokenizer) if messages else _plain(raw, tokenizer, config)
    check_embedded(text, tokenizer)
    return text


def check_embedded(text: str, tokenizer: Tokenizer) -> None:
    """Raises ValueError if a prompt has a token without an embedding in the model."""
    if any(token in text for token in tokenizer.beyond):
        ids = set(tokenizer.encode(text).tolist())
        for token, token_id in tokenizer.beyond.items():
            if token_id in ids:
                raise ValueError(f"the prompt has token {token!r} ({token_id}), which the model has no embedding for")


def tokenize(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig, *, source: str = "") -> Problem:
    """Renders and tokenizes a prompt of source `source`; raises ValueError as `render`."""
    task = raw.task
    # the environment continues the conversation
    if task.environment and (messages := messages_of(raw, tokenizer, config)):
        asked = asks_of(messages, tools=raw.tools, arguments=raw.template_arguments)
        task = dataclasses.replace(task, metadata=json.dumps(json.loads(task.metadata) | asked))
    return Problem(raw.question, tokenizer.encode(render(raw, tokenizer, config)), task, source, asked=raw.asked)


def _chat(raw: RawProblem, messages: tuple[JsonObject, ...], tokenizer: Tokenizer) -> str:
    continues = messages[-1]["role"] == "assistant" and not raw.task.environment
    check_complete(tokenizer.chat, messages, tools=raw.tools, arguments={**raw.template_arguments}, continues=continues)
    return tokenizer.render_chat(
        messages,
        add_generation_prompt=not raw.task.environment,
        continue_final_message=continues,
        tools=raw.tools,
        arguments=raw.template_arguments,
    )


def _plain(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> str:
    """Returns a prompt without chat template; raises ValueError if the row has fields that only a template shows."""
    fields = {name for m in raw.messages for name, value in m.items() if value not in NOTHING}
    has_only = sorted(fields - {"role", "content", "name", "prefix", *MAY_BE_DROPPED})
    has_only += ["tools"] * bool(raw.tools) + ["template arguments"] * bool(raw.template_arguments)
    if has_only:
        raise ValueError(f"the row has {', '.join(has_only)}, and no chat template is applied that could show them")
    text = config.system_prompt + raw.question
    bos = tokenizer.chat.special_tokens.get("bos_token", "") if config.add_bos else ""
    beginning = tokenizer.beginning or bos
    return text if text.startswith(beginning) else beginning + text


def messages_of(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> tuple[JsonObject, ...]:
    """Returns the prompt's messages if a chat template is applied, else ()."""
    if config.chat_template == "off" or (config.chat_template == "auto" and not tokenizer.chat.exists):
        return ()
    messages = raw.messages or ({"role": "user", "content": raw.question},)
    if config.system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages = ({"role": "system", "content": config.system_prompt}, *messages)
    return messages
