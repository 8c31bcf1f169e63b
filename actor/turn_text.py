"""A sampled turn as text: what the prompt began of it, what the policy wrote, its thinking and its answer."""

import dataclasses
from collections.abc import Collection

import numpy as np
import tokenizers
from jaxtyping import Int32

from bridge.text.chat_template import ChatTemplate
from bridge.text.thinking import DEFAULT, Parts, ThinkingFormat, read_format

_MAX_CONTEXT_TOKENS = 4096
"""Tokens before a turn in which the beginning of the assistant's message is looked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """One turn; special tokens are text."""

    begun: str
    """The part of the assistant's message that stands before the turn, such as `<think>`."""
    text: str
    """The turn without the token that ended it."""
    parts: Parts
    num_thinking_tokens: int
    """Tokens that are not of the answer, nor the turn's end; 0 where nothing is thinking."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnReader:
    """Reads turns of one model."""

    tokenizer: tokenizers.Tokenizer
    thinking: ThinkingFormat = DEFAULT

    def read(
        self, context: Int32[np.ndarray, " C"], turn: Int32[np.ndarray, " T"], stop_token_ids: Collection[int]
    ) -> TurnText:
        """The text of a turn.

        Args:
          context: all tokens before the turn.
          turn: the tokens as they were sampled.
          stop_token_ids: end a turn; one at the end is left out.
        """
        begun = self.thinking.begun_by(self._decode(context[-_MAX_CONTEXT_TOKENS:]))
        if not begun and context.size > _MAX_CONTEXT_TOKENS:  # a longer prefill hides the message's beginning
            begun = self.thinking.begun_by(self._decode(context))
        tokens = turn[:-1] if int(turn[-1]) in stop_token_ids else turn
        text = self._decode(tokens)
        parts = self.thinking.split(text, begun=begun)
        num_thinking_tokens = 0
        if parts.thinking or not parts.is_finished:
            # Only the answer is tokenized, which is short: where the thinking ends among the tokens is not known.
            num_thinking_tokens = max(
                0, tokens.size - len(self.tokenizer.encode(parts.answer, add_special_tokens=False).ids)
            )
        return TurnText(begun=begun, text=text, parts=parts, num_thinking_tokens=num_thinking_tokens)

    def _decode(self, tokens: Int32[np.ndarray, " T"]) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def turn_reader(tokenizer: tokenizers.Tokenizer, chat: ChatTemplate, thinking_marks: str) -> TurnReader:
    """The reader of a model, with the marks of its template and tokens or those of `model.thinking_marks`."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return TurnReader(tokenizer=tokenizer, thinking=read_format(chat, added, thinking_marks))
