"""Episodes: the engine and an environment in turns (ROLL Flash section 5.2.1, EnvManager), each for itself.

Token in, token out: what the engine sampled is what it is asked to go on with and what trains. Each turn is a request
of its own whose prompt is all that came before, so that with prefix caching it costs its new tokens only. Where an
environment takes its time nothing is in the engine.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Int32

from actor.engine.protocol import Engine, Sample
from actor.environments.pool import EnvironmentPool, EpisodeProcess
from actor.environments.protocol import EpisodeError
from actor.environments.rendering import Rendering
from actor.environments.transcript import Played, Transcript
from bridge.chat_template import Message
from bridge.types import Sampling
from configs.sections.environments import EnvironmentsConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
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
    def messages(self) -> list[Message]:
        """The prompt's."""
        return list(self.row.get("messages", ()))


class Episodes:
    """Plays any number of episodes at once."""

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        rendering: Rendering,
        config: EnvironmentsConfig,
        *,
        max_context_tokens: int,
    ) -> None:
        """`max_context_tokens`: prompt and episode together, `model.max_tokens`."""
        self._engine, self._pool, self._rendering, self._config = engine, pool, rendering, config
        self._max_context_tokens = max_context_tokens

    async def play(self, episode: Episode) -> Played:
        """Plays an episode to its end, from its start again where its environment fails.

        Cancelling it ends its request and its process.

        Raises:
          EpisodeError: the environment failed each time, or it can't be played at all.
          AbortedError, EngineDeadError: as `Engine.sample`.
        """
        problem = ""
        for attempt in range(1 + self._config.retries):
            try:
                async with self._pool.open(episode.environment) as process:
                    return await self._play(episode, process, request_id=f"{episode.request_id}@{attempt}")
            except EpisodeError as e:
                if e.is_final:
                    raise
                problem = str(e)
                logging.warning("episode failed environment=%s problem=%r", episode.environment, problem)
        raise EpisodeError(f"{problem} ({1 + self._config.retries} attempts)")

    async def _play(self, episode: Episode, process: EpisodeProcess, *, request_id: str) -> Played:
        start = await process.reset(episode.row)
        history = [*episode.messages, *start.messages]
        self._rendering.check(history, start.roles)
        transcript = Transcript(episode.prompt_tokens)
        transcript.observe(self._rendering.opening(episode.messages, start.messages))
        infos: list[dict[str, Any]] = []
        budget = min(episode.sampling.max_tokens, self._max_context_tokens - episode.prompt_tokens.size)
        if transcript.num_tokens >= budget:
            raise EpisodeError(
                f"environment {episode.environment}: {episode.prompt_tokens.size} tokens of prompt and "
                f"{transcript.num_tokens} of first observation leave no room for a turn; want sampling."
                f"max_response_tokens ({episode.sampling.max_tokens}) above the latter, and model.max_tokens "
                f"({self._max_context_tokens}) above both together",
                is_final=True,
            )
        while True:
            turn = await self._take_turn(episode, transcript, request_id=request_id, budget=budget)
            if turn.finish == "length" and transcript.num_tokens >= budget:
                return transcript.end("length", tuple(infos))  # cut off: no action
            step = await process.step(self._rendering.action(turn.tokens, episode.sampling.stop_token_ids))
            transcript.reward(step.reward)
            infos.append(step.info)
            if step.done:
                return transcript.end("stop", tuple(infos))
            if transcript.num_turns >= self._config.max_turns:
                return transcript.end("length", tuple(infos))
            observed = self._rendering.between(history, step.messages, turn=turn.tokens)
            if transcript.num_tokens + observed.size >= budget:
                return transcript.end("length", tuple(infos))
            transcript.observe(observed)

    async def _take_turn(self, episode: Episode, transcript: Transcript, *, request_id: str, budget: int) -> Sample:
        left = budget - transcript.num_tokens
        max_tokens = min(left, self._config.max_turn_tokens or left)
        sample = await self._engine.sample(
            transcript.request_tokens,
            dataclasses.replace(
                episode.sampling, max_tokens=max_tokens, min_tokens=min(episode.sampling.min_tokens, max_tokens)
            ),
            request_id=f"{request_id}.{transcript.num_turns}",
            priority=episode.priority,
        )
        if not sample.tokens.size:
            raise EpisodeError(f"environment {episode.environment}: a turn of no token was sampled")
        transcript.take_turn(sample)
        return sample
