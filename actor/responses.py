"""Conversion of engine samples to the responses that verifiers receive."""

import dataclasses
import re

import numpy as np
import tokenizers

from actor.engine_protocol import Sample
from actor.rewards.types import Response
from actor.turn_text import turn_reader
from bridge.rollout_types import Ticket
from bridge.text.chat_template import ChatTemplate


class ResponseReader:
    """Converter of one model's samples to responses."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat: ChatTemplate, *, thinking_marks: str = "auto") -> None:
        self._turns = turn_reader(tokenizer, chat, thinking_marks)
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special and t.content}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def __call__(self, ticket: Ticket, sample: Sample) -> Response:
        """Returns the response of a ticket's sample: an episode's last turn, with the thinking tokens of all turns."""
        tokens = np.concatenate([ticket.prompt_tokens, sample.tokens])
        first, stops = ticket.prompt_tokens.size, ticket.sampling.stop_token_ids
        turns = [
            self._turns.read(tokens[: first + begin], tokens[first + begin : first + end], stops)
            for begin, end in sample.turns
        ]
        last = turns[-1]
        parts = dataclasses.replace(
            last.parts,
            thinking=self._special.sub("", last.parts.thinking),
            answer=self._special.sub("", last.parts.answer),
        )
        return Response(
            text=last.text,
            finish=sample.finish,
            num_tokens=sample.num_sampled,
            begun_by_prompt=last.begun,
            parts=parts,
            num_thinking_tokens=sum(turn.num_thinking_tokens for turn in turns),
        )
