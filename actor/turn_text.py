"""Text of one sampled turn: prefilled beginning, thinking and answer."""

import dataclasses
from collections.abc import Collection

import numpy as np
import tokenizers
from jaxtyping import Int32

from bridge.text.chat_template import ChatTemplate
from bridge.text.thinking import DEFAULT, Parts, ThinkingFormat, read_format

_MAX_CONTEXT_TOKENS = 4096
"""Tokens before a turn that are searched for the beginning of the assistant's message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """Text of one turn; special tokens are kept as text."""

    begun: str
    """Prefilled part of the assistant's message, such as `<think>`."""
    text: str
    """Sampled text without the stop token."""
    parts: Parts
    num_thinking_tokens: int
    """Tokens outside the answer, excluding the stop token; 0 without thinking."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnReader:
    """Reader of one model's turns."""

    tokenizer: tokenizers.Tokenizer
    thinking: ThinkingFormat = DEFAULT

    def read(
        self, context: Int32[np.ndarray, " C"], turn: Int32[np.ndarray, " T"], stop_token_ids: Collection[int]
    ) -> TurnText:
        """Returns the text of a turn that follows `context`; a trailing token of `stop_token_ids` is removed."""
        end, header = self._decode(context[-_MAX_CONTEXT_TOKENS:]), self.thinking.header
        if context.size > _MAX_CONTEXT_TOKENS and header and header not in end:  # hidden by a longer prefill
            end = self._decode(context)
        begun = self.thinking.begun_by(end)
        tokens = turn[:-1] if int(turn[-1]) in stop_token_ids else turn
        text = self._decode(tokens)
        parts = self.thinking.split(text, begun=begun)
        num_thinking_tokens = 0
        if parts.thinking or not parts.is_finished:
            # Only the short answer is tokenized, because the token position where thinking ends is unknown.
            num_thinking_tokens = max(
                0, tokens.size - len(self.tokenizer.encode(parts.answer, add_special_tokens=False).ids)
            )
        return TurnText(begun=begun, text=text, parts=parts, num_thinking_tokens=num_thinking_tokens)

    def _decode(self, tokens: Int32[np.ndarray, " T"]) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def turn_reader(tokenizer: tokenizers.Tokenizer, chat: ChatTemplate, thinking_marks: str) -> TurnReader:
    """Returns a model's reader, with thinking marks from its template and tokens or from `model.thinking_marks`."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return TurnReader(tokenizer=tokenizer, thinking=read_format(chat, added, thinking_marks))
