"""What an environment says, as tokens behind those that are there: history is never rendered or tokenized again.

A chat template is asked for a conversation in which a word of ours stands for the policy's turn, and what it puts
behind that word is what follows a real turn. So a template that drops or rewrites past turns (Qwen3 takes the thinking
out of them) changes nothing: those turns are tokens by then.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Sequence
from typing import Literal

import numpy as np
import tokenizers
from jaxtyping import Int32

from actor.engine.turn_text import TurnReader, TurnText, turn_reader
from actor.environments.protocol import EpisodeError
from bridge.chat_template import ChatTemplate, Message, read_chat_template
from bridge.thinking import DEFAULT, ThinkingFormat

_STAND_IN = "Sluicestandin"
"""For a turn of the policy: one word, which no template trims or takes for anything else."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A model's tokenizer, and its chat template where it is applied."""

    tokenizer: tokenizers.Tokenizer
    chat: ChatTemplate | None
    """None: prompts and observations are plain text, one behind the other."""
    thinking: ThinkingFormat = DEFAULT
    """The marks of the model's thinking."""

    def opening(self, messages: Sequence[Message], observed: Sequence[Message]) -> Int32[np.ndarray, " T"]:
        """What follows a prompt of `messages`, rendered without a generation prompt, up to the policy's first turn.

        Raises:
          EpisodeError: the template refuses the messages.
        """
        if self.chat is None:
            return self._encode(_plain(observed))
        prompt = self._render(messages, ends=False)
        whole = self._render([*messages, *observed], ends=True)
        if not whole.startswith(prompt):
            raise EpisodeError(
                f"the chat template of {self.chat.folder} renders a prompt otherwise when a message or the generation "
                f"prompt follows it, so that nothing can be appended to it: {prompt[-200:]!r}",
                is_final=True,
            )
        return self._encode(whole[len(prompt) :])

    def check(self, history: Sequence[Message], roles: Collection[str]) -> None:
        """Tries whether the template takes an observation of each role behind a turn of the policy.

        Raises:
          EpisodeError: it doesn't.
        """
        if self.chat is not None:
            for role in roles:
                self._behind_turn(history, [{"role": role, "content": "x"}])

    def between(
        self, history: Sequence[Message], observed: Sequence[Message], *, turn: Int32[np.ndarray, " T"]
    ) -> Int32[np.ndarray, " S"]:
        """What stands between two turns of the policy: the end of one, the observation, the beginning of the next.

        Args:
          history: the messages before the first turn.
          observed: what the environment said; without a template a line break where that has no token.
          turn: the turn as it was sampled; the end that the template gives a turn is left out where it is there.

        Raises:
          EpisodeError: the template refuses the messages, or nothing stands there.
        """
        text = _plain(observed) if self.chat is None else self._behind_turn(history, observed)
        tokens = self._encode(text)
        if self.chat is None:
            # Two turns must not become one, and that a tool says nothing is the policy's doing.
            tokens = tokens if tokens.size else self._encode("\n")
        else:
            tokens = tokens[self._num_there(tokens, int(turn[-1])) :]
        if not tokens.size:
            raise EpisodeError(f"an observation must be at least one token, got {list(observed)}", is_final=True)
        return tokens

    def read(
        self, context: Int32[np.ndarray, " C"], turn: Int32[np.ndarray, " T"], stop_token_ids: Collection[int]
    ) -> TurnText:
        """A turn of the policy as text (`TurnReader.read`)."""
        return TurnReader(tokenizer=self.tokenizer, thinking=self.thinking).read(context, turn, stop_token_ids)

    def _behind_turn(self, history: Sequence[Message], observed: Sequence[Message]) -> str:
        stand_in = _STAND_IN
        while any(stand_in in m["content"] for m in [*history, *observed]):
            stand_in += "x"
        text = self._render([*history, {"role": "assistant", "content": stand_in}, *observed], ends=True)
        before, found, behind = text.partition(stand_in)
        if not found or stand_in in behind:
            raise EpisodeError(
                f"the chat template of {self._folder} does not show an assistant's message once, as it is: {before!r}",
                is_final=True,
            )
        return behind

    def _num_there(self, tokens: Int32[np.ndarray, " T"], last: int) -> int:
        """How many of the first tokens, the end of a turn with white space before it, were sampled already."""
        found = np.flatnonzero(tokens == last)
        if not found.size or self._decode(tokens[: found[0]]).strip():
            return 0
        return int(found[0]) + 1

    def _render(self, messages: Sequence[Message], *, ends: bool) -> str:
        assert self.chat is not None
        try:
            return self.chat.render(messages, add_generation_prompt=ends)
        except ValueError as e:
            roles = ", ".join(m["role"] for m in messages)
            raise EpisodeError(f"{e} (their roles: {roles})", is_final=True) from e

    @property
    def _folder(self) -> pathlib.Path | None:
        return self.chat.folder if self.chat is not None else None

    def _encode(self, text: str) -> Int32[np.ndarray, " T"]:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def _decode(self, tokens: Int32[np.ndarray, " T"]) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def read_rendering(
    folder: pathlib.Path, chat_template: Literal["auto", "on", "off"], *, thinking_marks: str = "auto"
) -> Rendering:
    """Reads a model folder's tokenizer and chat template; the latter as `prompts.chat_template` says.

    Raises:
      ValueError: a file is missing or damaged, or chat_template=on and there is none.
    """
    file = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the Rust library raises plain Exception
        raise ValueError(f"{file} is no tokenizer: {e}") from e
    chat = read_chat_template(folder)
    if chat_template == "on" and not chat.source:
        raise ValueError(f"{folder} has no chat template; set prompts.chat_template=off")
    return Rendering(
        tokenizer=tokenizer,
        chat=chat if chat.source and chat_template != "off" else None,
        thinking=turn_reader(tokenizer, chat, thinking_marks).thinking,
    )


def _plain(observed: Sequence[Message]) -> str:
    return "".join(m["content"] for m in observed)
