"""Rendering of observations as tokens appended to the history, which is never rendered or tokenized again.

The chat template renders a conversation in which a stand-in word replaces the policy's turn. The text after that word
follows the real turn. A template that drops or rewrites past turns (Qwen3 removes their thinking) thus has no effect.
Control tokens spelled out in an environment's messages stay plain text: tool output cannot end or begin a turn.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tokenizers
from jaxtyping import Int32

from actor.environments.protocol import EpisodeError
from actor.turn_text import TurnReader, TurnText, turn_reader
from bridge.text import text_tokens
from bridge.text.chat_template import ChatTemplate, Conversation, Message, TemplateSettings, read_chat_template
from bridge.text.thinking import DEFAULT, ThinkingFormat

_STAND_IN = "Sluicestandin"
"""Stand-in for a policy turn: one word that no template trims or treats specially."""
_OBSERVED = "Sluiceobserved"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatRenderer:
    """Tokenizer and chat template of a model."""

    tokenizer: tokenizers.Tokenizer
    chat: ChatTemplate | None
    """Chat template; None if it is not applied: prompts and observations are concatenated as plain text."""
    control: text_tokens.ControlTokens = text_tokens.ControlTokens(frozenset(), frozenset())
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the prompt, for the template."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Template arguments of the prompt."""
    thinking: ThinkingFormat = DEFAULT

    def of_prompt(self, tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> "ChatRenderer":
        """Returns the renderer of an episode whose prompt has its own tools or template arguments."""
        return dataclasses.replace(self, tools=tools, arguments=arguments) if tools or arguments else self

    def opening(self, messages: Conversation, observed: Sequence[Message]) -> Int32[np.ndarray, " T"]:
        """Returns the tokens between a prompt of `messages`, rendered without generation prompt, and the first turn.

        Raises EpisodeError if the template rejects the messages, or no observation follows an assistant message.
        """
        if self.chat is None:
            return self._encode(self._plain(observed))
        if messages and messages[-1]["role"] == "assistant" and not observed:
            raise EpisodeError(
                "the prompt ends with an assistant message; reset() must return a message after it",
                is_final=True,
            )
        prompt = self._render(messages, ends=False)
        whole = self._render([*messages, *observed], ends=True)
        if not whole.startswith(prompt):
            raise EpisodeError(
                f"the chat template of {self.chat.folder} renders a prompt otherwise when a message or the generation "
                f"prompt follows it, so that nothing can be appended to it: {prompt[-200:]!r}",
                is_final=True,
            )
        return self._encode(whole[len(prompt) :])

    def check(self, history: Conversation, roles: Collection[str]) -> None:
        """Raises EpisodeError unless the template shows an observation of each role once after a policy turn."""
        for role in roles if self.chat is not None else ():
            behind = self._behind_turn(history, [{"role": role, "content": _OBSERVED}])
            if (count := behind.count(_OBSERVED)) != 1:
                raise EpisodeError(
                    f"the chat template of {self._folder} shows an observation of role {role!r} {count} times, not "
                    f"once: {behind!r}; use another role (observation_roles), or another template",
                    is_final=True,
                )

    def between(
        self, history: Conversation, observed: Sequence[Message], *, turn: Int32[np.ndarray, " T"]
    ) -> Int32[np.ndarray, " S"]:
        """Returns the tokens between two policy turns: end of turn, observation, beginning of the next turn.

        `history` has the messages before the first turn. The template's end of turn is omitted if `turn` contains it.
        Without a template, an observation without tokens becomes a line break. Raises EpisodeError if the template
        rejects the messages, or the result is empty.
        """
        text = self._plain(observed) if self.chat is None else self._behind_turn(history, observed)
        tokens = self._encode(text)
        if self.chat is None:
            # Two turns must not merge. An empty tool result is the policy's doing, so no error.
            tokens = tokens if tokens.size else self._encode("\n")
        else:
            tokens = tokens[self._num_there(tokens, int(turn[-1])) :]
        if not tokens.size:
            raise EpisodeError(f"an observation must be at least one token, got {list(observed)}", is_final=True)
        return tokens

    def read(
        self, context: Int32[np.ndarray, " C"], turn: Int32[np.ndarray, " T"], stop_token_ids: Collection[int]
    ) -> TurnText:
        """Returns a policy turn as text (`TurnReader.read`)."""
        return TurnReader(tokenizer=self.tokenizer, thinking=self.thinking).read(context, turn, stop_token_ids)

    def _behind_turn(self, history: Conversation, observed: Sequence[Message]) -> str:
        stand_in, texts = _STAND_IN, repr([*history, *observed])
        while stand_in in texts:
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
        """Returns how many leading tokens (end of turn, with white space before it) were already sampled."""
        found = np.flatnonzero(tokens == last)
        if not found.size or self.tokenizer.decode(tokens[: found[0]].tolist(), skip_special_tokens=False).strip():
            return 0
        return int(found[0]) + 1

    def _render(self, messages: Conversation, *, ends: bool) -> str:
        assert self.chat is not None
        try:
            return self.chat.render(
                self.control.as_text(messages),
                add_generation_prompt=ends,
                tools=self.control.values_as_text(self.tools),
                arguments=self.arguments,
            )
        except ValueError as e:
            roles = ", ".join(str(m["role"]) for m in messages)
            raise EpisodeError(f"{e} (their roles: {roles})", is_final=True) from e

    @property
    def _folder(self) -> pathlib.Path | None:
        return self.chat.folder if self.chat is not None else None

    def _encode(self, text: str) -> Int32[np.ndarray, " T"]:
        return np.asarray(text_tokens.encode(self.tokenizer, text), np.int32)

    def _plain(self, observed: Sequence[Message]) -> str:
        return "".join(m["content"] for m in self.control.as_text(observed))


def read_rendering(
    folder: pathlib.Path,
    chat_template: Literal["auto", "on", "off"],
    template: TemplateSettings | None = None,
    *,
    thinking_marks: str = "auto",
) -> ChatRenderer:
    """Reads a model folder's tokenizer and chat template.

    Raises ValueError if a file is missing or damaged, or `chat_template` is "on" and the folder has no template.
    """
    tokenizer = text_tokens.read_tokenizer(folder)
    found = read_chat_template(folder, template)
    if chat_template == "on" and not found.exists:
        raise ValueError(f"{folder} has no chat template; set prompts.chat_template=off")
    chat = found if found.exists and chat_template != "off" else None
    eos = tokenizer.token_to_id(found.special_tokens.get("eos_token", ""))
    ends = [] if eos is None else [eos]
    return ChatRenderer(
        tokenizer=tokenizer,
        chat=chat,
        control=text_tokens.control_tokens(tokenizer, chat, ends=ends),
        thinking=turn_reader(tokenizer, found, thinking_marks).thinking,
    )
