"""Tokens, masks and logprobs of an episode."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32
from msgspec import UNSET

from actor.engine_protocol import Engine, Episode, Sample
from actor.environments.protocol import EpisodeError
from bridge.rollout_types import Finish, Sampling, Version
from bridge.routed_experts import extend_routing
from bridge.text.chat_template import PROMPT_TEMPLATE, JsonObject


class Transcript:
    """Growing token record of an episode."""

    def __init__(self, prompt_tokens: Int32[np.ndarray, " P"]) -> None:
        self._prompt_tokens = prompt_tokens
        self._parts: list[Sample | Int32[np.ndarray, " T"]] = []
        self._rewards: list[float] = []
        self.num_tokens = 0

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return sum(isinstance(part, Sample) for part in self._parts)

    @property
    def request_tokens(self) -> Int32[np.ndarray, " P+T"]:
        """Prompt and all later tokens: the prompt of the next request."""
        return np.concatenate([self._prompt_tokens, *map(_tokens, self._parts)])

    def observe(self, tokens: Int32[np.ndarray, " T"]) -> None:
        """Appends an observation."""
        self._parts.append(tokens)
        self.num_tokens += tokens.size

    def take_turn(self, sample: Sample) -> None:
        """Appends a policy turn with reward 0."""
        self._parts.append(sample)
        self._rewards.append(0.0)
        self.num_tokens += sample.tokens.size

    def reward(self, value: float, *, before_last: bool = False) -> None:
        """Sets the reward of the last turn, or with `before_last` of the turn before it, if any."""
        if not before_last:
            self._rewards[-1] = value
        elif len(self._rewards) > 1:
            self._rewards[-2] = value

    def end(self, finish: Finish) -> Sample:
        """Returns the whole episode, T tokens after the prompt and N turns; requires at least one turn.

        `finish` is "stop" if the environment was done, "length" if a budget ran out. An observed token has the version
        of the sampled token before it (or of the first sampled token), so that versions never decrease.
        """
        versions: list[Version | None] = []
        for part in self._parts:
            last = versions[-1] if versions else None
            versions += part.token_versions if isinstance(part, Sample) else [last] * part.size
        first = next(v for v in versions if v is not None)
        return Sample(
            tokens=np.concatenate([*map(_tokens, self._parts)]),
            logprobs=np.concatenate(
                [p.logprobs if isinstance(p, Sample) else np.zeros(p.size, np.float32) for p in self._parts]
            ),
            token_versions=tuple(first if v is None else v for v in versions),
            finish=finish,
            routed_experts=functools.reduce(
                extend_routing, (p.routed_experts for p in self._parts if isinstance(p, Sample)), UNSET
            ),
            episode=Episode(
                sampled=np.concatenate([np.full(_tokens(p).size, isinstance(p, Sample)) for p in self._parts]),
                turn_rewards=np.asarray(self._rewards, np.float32),
            ),
        )


def _tokens(part: Sample | Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
    return part.tokens if isinstance(part, Sample) else part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """Request to play one episode."""

    environment: str
    prompt_tokens: Int32[np.ndarray, " P"]
    """Messages of the row, rendered without a generation prompt."""
    row: Mapping[str, Any]
    """Prompt row for the environment; `messages` holds the prompt's messages, required with a chat template."""
    sampling: Sampling
    """Sampling parameters per turn; `max_tokens` bounds the whole episode, sampled and observed."""
    request_id: str
    """Prefix of the turns' request ids."""
    priority: int

    @property
    def messages(self) -> list[JsonObject]:
        """Messages of the prompt."""
        return list(self.row.get("messages", ()))

    @property
    def tools(self) -> list[JsonObject]:
        """Tool schemas of the prompt, for the chat template."""
        return list(self.row.get(PROMPT_TEMPLATE, {}).get("tools", ()))

    @property
    def template_arguments(self) -> JsonObject:
        """Chat template arguments of the prompt."""
        return dict(self.row.get(PROMPT_TEMPLATE, {}).get("arguments", {}))


class EpisodeTurns:
    """Episode transcript and sampling of its next turns."""

    def __init__(
        self, engine: Engine, episode: EpisodeRequest, *, request_id: str, budget_tokens: int, max_turn_tokens: int
    ) -> None:
        """`budget_tokens`: tokens that may follow the prompt. `max_turn_tokens`: limit per turn; 0 means no limit."""
        self._engine, self._episode, self._request_id = engine, episode, request_id
        self._max_turn_tokens = max_turn_tokens
        self.budget_tokens = budget_tokens
        self.transcript = Transcript(episode.prompt_tokens)

    @property
    def left_tokens(self) -> int:
        """Tokens left in the budget."""
        return self.budget_tokens - self.transcript.num_tokens

    async def take(self, stop_token_ids: Collection[int] = ()) -> Sample:
        """Samples the policy's next turn; requires at least one token in the budget.

        `stop_token_ids` are added to the episode's. Raises EpisodeError if the turn has no token.
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
