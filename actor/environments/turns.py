"""One episode's turns of the policy: each a request to the engine with all that came before, within the budgets."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from actor.engine.protocol import Engine, Sample
from actor.environments.protocol import EpisodeError
from actor.environments.transcript import Transcript
from bridge.chat_template import PROMPT_TEMPLATE, JsonObject
from bridge.types import Sampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """What is to be played."""

    environment: str
    prompt_tokens: Int32[np.ndarray, " P"]
    """The row's messages, rendered without a generation prompt."""
    row: Mapping[str, Any]
    """The row of prompts, for the environment; `messages` are those of the prompt, wanted with a chat template."""
    sampling: Sampling
    """Of each turn; `max_tokens` bounds the whole episode, sampled and observed tokens together."""
    request_id: str
    """Those of the turns begin with it."""
    priority: int

    @property
    def messages(self) -> list[JsonObject]:
        """The prompt's."""
        return list(self.row.get("messages", ()))

    @property
    def tools(self) -> list[JsonObject]:
        """Schemas of tools in the prompt, for the chat template."""
        return list(self.row.get(PROMPT_TEMPLATE, {}).get("tools", ()))

    @property
    def template_arguments(self) -> JsonObject:
        """The prompt's own arguments for the chat template."""
        return dict(self.row.get(PROMPT_TEMPLATE, {}).get("arguments", {}))


class Turns:
    """An episode's transcript, and how it goes on."""

    def __init__(
        self, engine: Engine, episode: EpisodeRequest, *, request_id: str, budget_tokens: int, max_turn_tokens: int
    ) -> None:
        """Nothing was said yet; `budget_tokens` are all that may follow the prompt, `max_turn_tokens` 0 is no limit."""
        self._engine, self._episode, self._request_id = engine, episode, request_id
        self._max_turn_tokens = max_turn_tokens
        self.budget_tokens = budget_tokens
        self.transcript = Transcript(episode.prompt_tokens)

    @property
    def left_tokens(self) -> int:
        """That may follow still."""
        return self.budget_tokens - self.transcript.num_tokens

    async def take(self, stop_token_ids: Collection[int] = ()) -> Sample:
        """Samples the policy's next turn; one more token at least must be left.

        Args:
          stop_token_ids: end it besides the episode's own.

        Raises:
          EpisodeError: no token was sampled.
        """
        sampling, left = self._episode.sampling, self.left_tokens
        max_tokens = min(left, self._max_turn_tokens or left)
        stops = sampling.stop_token_ids
        sample = await self._engine.sample(
            self.transcript.request_tokens,
            dataclasses.replace(
                sampling,
                max_tokens=max_tokens,
                min_tokens=min(sampling.min_tokens, max_tokens),
                stop_token_ids=(*stops, *sorted(set(stop_token_ids) - set(stops))),
            ),
            request_id=f"{self._request_id}.{self.transcript.num_turns}",
            priority=self._episode.priority,
        )
        if not sample.tokens.size:
            raise EpisodeError(f"environment {self._episode.environment}: a turn of no token was sampled")
        self.transcript.take_turn(sample)
        return sample
