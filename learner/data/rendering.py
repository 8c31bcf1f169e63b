"""Problems to prompt tokens: the chat template, the system prompt, the BOS token."""

import dataclasses
import json

from bridge.chat_template import Message
from configs.schema import Config
from configs.sections import PromptsConfig
from learner.data.problems import Problem, RawProblem
from learner.data.tokenizer import Tokenizer


def render(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> str:
    """The prompt's text.

    An episode's ends where the generation prompt would begin: the environment may have to say something first, and what
    leads up to the policy's turn is added where episodes are played.

    Raises:
      ValueError: there is no chat template, or it refuses the messages.
    """
    if messages := _messages(raw, tokenizer, config):
        return tokenizer.render_chat(messages, add_generation_prompt=not raw.environment)
    text = config.system_prompt + raw.question
    if config.add_bos:
        text = tokenizer.special_tokens.get("bos_token", "") + text
    return text


def tokenize(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig, *, source: str = "") -> Problem:
    """Renders and tokenizes a prompt; `source` is its source's name.

    Raises:
      ValueError: there is no chat template, or it refuses the messages.
    """
    task = raw.task
    if raw.environment and (messages := _messages(raw, tokenizer, config)):  # what goes on with them must know them
        metadata = json.loads(task.metadata) | {"messages": messages}
        task = dataclasses.replace(task, metadata=json.dumps(metadata))
    return Problem(raw.question, tokenizer.encode(render(raw, tokenizer, config)), task, source)


def _messages(raw: RawProblem, tokenizer: Tokenizer, config: PromptsConfig) -> tuple[Message, ...]:
    """The prompt's, where a chat template is applied; else none."""
    if config.chat_template == "off" or (config.chat_template == "auto" and not tokenizer.chat_template):
        return ()
    messages = raw.messages or ({"role": "user", "content": raw.question},)
    if config.system_prompt and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": config.system_prompt}, *messages)
    return messages


def max_prompt_tokens(config: Config, *, response_tokens: int = 0) -> int:
    """Tokens that the response leaves for a prompt; `response_tokens` 0: sampling.max_response_tokens."""
    return config.model.max_tokens - (response_tokens or config.sampling.max_response_tokens)
