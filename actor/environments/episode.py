"""Episodes: the engine and an environment take turns (ROLL Flash section 5.2.1, EnvManager), independently per episode.

Token in, token out: sampled tokens are reused unchanged as context and for training. Each turn is one engine request
with all earlier tokens as its prompt, so prefix caching computes only new tokens. No request waits in the engine while
an environment works.
"""

import msgspec
import numpy as np
from absl import logging

from actor.engine_protocol import Engine, Sample
from actor.environments import wire
from actor.environments.chat_render import ChatRenderer
from actor.environments.environment_pool import EnvironmentPool, EpisodeProcess
from actor.environments.protocol import EpisodeError
from actor.environments.token_endpoint import Conversation, TokenEndpoint
from actor.environments.transcript import EpisodeRequest, EpisodeTurns
from bridge.rollout_types import MAX_ABS_REWARD
from configs.sections.actor import EnvironmentsConfig

RETRIES = 2
"""Retries of an episode from its start after its environment failed. After the last one, its group is dropped."""


class Episodes:
    """Player of any number of concurrent episodes."""

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        rendering: ChatRenderer,
        config: EnvironmentsConfig,
        *,
        max_context_tokens: int,
        retries: int = RETRIES,
    ) -> None:
        """`max_context_tokens`: limit for prompt and episode together, `model.max_tokens`."""
        self._engine, self._pool, self._rendering, self._config = engine, pool, rendering, config
        self._max_context_tokens, self._retries = max_context_tokens, retries
        self.num_failures = 0
        """Failed attempts, also those that a retry followed successfully."""
        self.failures = pool.failures
        """Process failures among the failed attempts, by kind (`EnvironmentPool.failures`)."""
        self._endpoint: TokenEndpoint | None = None

    async def play(self, episode: EpisodeRequest) -> Sample:
        """Plays an episode to its end; restarts it if its environment fails. Cancellation ends request and process.

        Raises EpisodeError if all attempts failed, or the episode cannot be played; see also `Engine.sample`.
        """
        problem = ""
        for attempt in range(1 + self._retries):
            try:
                async with self._pool.open(episode.environment) as process:
                    played = await self._play(episode, process, request_id=f"{episode.request_id}@{attempt}")
                assert played.episode is not None
                rewards = played.episode.turn_rewards
                if played.finish == "length":  # penalty for an episode that a budget truncated
                    rewards[-1] += self._config.truncated_reward
                earned = float(rewards.sum(dtype=np.float64))
                if abs(earned) > MAX_ABS_REWARD:
                    raise EpisodeError(f"its turns earn {earned} together, at most {MAX_ABS_REWARD:g} counts")
                return played
            except EpisodeError as e:
                self.num_failures += 1
                if e.is_final:
                    raise
                problem = str(e)
                logging.warning("episode failed environment=%s problem=%r", episode.environment, problem)
        raise EpisodeError(f"{problem} ({1 + self._retries} attempts)")

    async def close(self) -> None:
        """Stops the environments' processes and the token endpoint."""
        if self._endpoint is not None:
            await self._endpoint.close()
        await self._pool.close()

    async def _play(self, episode: EpisodeRequest, process: EpisodeProcess, *, request_id: str) -> Sample:
        start = await process.reset(episode.row)
        budget = min(episode.sampling.max_tokens, self._max_context_tokens - episode.prompt_tokens.size)
        turns = EpisodeTurns(
            self._engine,
            episode,
            request_id=request_id,
            budget_tokens=budget,
            max_turn_tokens=self._config.max_turn_tokens,
        )
        if start.plays_itself:
            return await self._let_play(process, Conversation(turns, max_turns=self._config.max_turns))
        return await self._play_turns(episode, process, turns, start)

    async def _play_turns(
        self, episode: EpisodeRequest, process: EpisodeProcess, turns: EpisodeTurns, start: wire.Observed
    ) -> Sample:
        history, transcript = [*episode.messages, *start.messages], turns.transcript
        rendering = self._rendering.of_prompt(episode.tools, episode.template_arguments)
        rendering.check(history, start.roles)
        transcript.observe(rendering.opening(episode.messages, start.messages))
        if turns.left_tokens <= 0:
            raise EpisodeError(
                f"environment {episode.environment}: {episode.prompt_tokens.size} tokens of prompt and "
                f"{transcript.num_tokens} of the first observation leave no tokens for a turn. Set "
                f"sampling.max_response_tokens (now {episode.sampling.max_tokens}) above {transcript.num_tokens} and "
                f"model.max_tokens (now {self._max_context_tokens}) above their sum",
                is_final=True,
            )
        while True:
            context = transcript.request_tokens
            turn = await turns.take()
            if turn.finish == "length":
                return transcript.end("length")  # A part of a turn is no action.
            said = self._rendering.read(context, turn.tokens, episode.sampling.stop_token_ids)
            step = await process.step(said.begun + said.text if start.sees_thinking else said.parts.answer)
            transcript.reward(step.reward)
            if step.done:
                return transcript.end("stop")
            if transcript.num_turns >= self._config.max_turns:
                return transcript.end("length")
            observed = rendering.between(history, step.messages, turn=turn.tokens)
            if observed.size >= turns.left_tokens:
                return transcript.end("length")
            transcript.observe(observed)

    async def _let_play(self, process: EpisodeProcess, conversation: Conversation) -> Sample:
        """Runs an environment that requests its turns itself, at a token endpoint of its own."""
        if self._endpoint is None:
            self._endpoint = TokenEndpoint()
        async with self._endpoint.serve(conversation) as address:
            step = await process.step(msgspec.json.encode(address).decode(), plays_itself=True)
        return conversation.end(step)
