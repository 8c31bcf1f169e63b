"""Problems to prompt tokens: the chat template, the system prompt, the BOS token."""

import dataclasses
import json

from bridge.chat_template import JsonObject, asks_of
from configs.schema import Config
from configs.sections import PromptsConfig
from learner.data.completeness import MAY_BE_DROPPED, NOTHING, check_complete
from learner.data.problems import Problem, RawProblem
from learner.data.tokenizer import Tokenizer


def render(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> str:
    """Returns the prompt's text, as `Tokenizer.encode` reads it.

    A conversation that ends with the assistant's words is continued: the text ends with them. An episode's text ends
    where the generation prompt would begin: the environment may have to say something first, and what leads up to the
    policy's turn is added where episodes are played.

    Raises:
      ValueError: there is no chat template, it refuses the messages or leaves out a part of them, or the prompt has a
        token that the model has no embedding for.
    """
    messages = _messages(raw, tokenizer, config)
    text = _chat(raw, messages, tokenizer) if messages else _plain(raw, tokenizer, config)
    if any(token in text for token in tokenizer.beyond):
        ids = set(tokenizer.encode(text).tolist())
        for token, token_id in tokenizer.beyond.items():
            if token_id in ids:
                raise ValueError(f"the prompt has token {token!r} ({token_id}), which the model has no embedding for")
    return text


def tokenize(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig, *, source: str = "") -> Problem:
    """Renders and tokenizes a prompt; `source` is its source's name.

    Raises:
      ValueError: as `render`.
    """
    task = raw.task
    if raw.environment and (messages := _messages(raw, tokenizer, config)):  # what goes on with them must know them
        asked = asks_of(messages, tools=raw.tools, arguments=raw.template_arguments)
        task = dataclasses.replace(task, metadata=json.dumps(json.loads(task.metadata) | asked))
    return Problem(raw.question, tokenizer.encode(render(raw, tokenizer, config)), task, source)


def _chat(raw: RawProblem, messages: tuple[JsonObject, ...], tokenizer: Tokenizer) -> str:
    continues = messages[-1]["role"] == "assistant" and not raw.environment
    check_complete(tokenizer.chat, messages, tools=raw.tools, arguments={**raw.template_arguments}, continues=continues)
    return tokenizer.render_chat(
        messages,
        add_generation_prompt=not raw.environment,
        continue_final_message=continues,
        tools=raw.tools,
        arguments=raw.template_arguments,
    )


def _plain(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> str:
    """The texts one behind the other, behind the tokens that the tokenizer itself puts before a text.

    Raises:
      ValueError: the row has what only a chat template can show.
    """
    fields = {name for m in raw.messages for name, value in m.items() if value not in NOTHING}
    has_only = sorted(fields - {"role", "content", "name", "prefix", *MAY_BE_DROPPED})
    has_only += ["tools"] * bool(raw.tools) + ["template arguments"] * bool(raw.template_arguments)
    if has_only:
        raise ValueError(f"the row has {', '.join(has_only)}, and no chat template is applied that could show them")
    text = config.system_prompt + raw.question
    bos = tokenizer.special_tokens.get("bos_token", "") if config.add_bos else ""
    beginning = tokenizer.beginning or bos
    return text if text.startswith(beginning) else beginning + text


def _messages(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> tuple[JsonObject, ...]:
    """The prompt's, where a chat template is applied; else none."""
    if config.chat_template == "off" or (config.chat_template == "auto" and not tokenizer.chat.exists):
        return ()
    messages = raw.messages or ({"role": "user", "content": raw.question},)
    if config.system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages = ({"role": "system", "content": config.system_prompt}, *messages)
    return messages


def max_prompt_tokens(config: Config, *, response_tokens: int = 0) -> int:
    """Tokens that the response leaves for a prompt; `response_tokens` 0: sampling.max_response_tokens."""
    return config.model.max_tokens - (response_tokens or config.sampling.max_response_tokens)
