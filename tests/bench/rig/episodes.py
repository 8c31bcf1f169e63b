"""Episodes on the rig: turns of a given length, environments of drawn latencies, each for itself or in lock-step.

The actor asks for a response and gets an episode, played by `actor.environments` in processes of their own.
"""

import asyncio
import contextlib
import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int32

from actor.engine_protocol import Engine, PartialSample, Sample
from actor.environments.chat_render import ChatRenderer
from actor.environments.environment_pool import EnvironmentPool
from actor.environments.episode import Episodes
from actor.environments.transcript import EpisodeRequest
from bridge.rollout_types import Sampling
from configs.sections.actor import EnvironmentsConfig
from tests.bench.rig.lengths import Work
from tests.bench.rig.replay import ReplayEngine


class LockStep:
    """A batch that goes on when all of it is there; the next batch is as large."""

    def __init__(self, num_episodes: int) -> None:
        self._num_episodes = self._num_left = num_episodes
        self._waiting: list[asyncio.Future[None]] = []

    async def meet(self) -> None:
        """Returns when all that have not left are here."""
        here = asyncio.get_running_loop().create_future()
        self._waiting.append(here)
        self._release()
        await here

    def leave(self) -> None:
        """One has ended."""
        self._num_left -= 1
        self._release()
        self._num_left = self._num_left or self._num_episodes

    def _release(self) -> None:
        if self._waiting and len(self._waiting) == self._num_left:
            waiting, self._waiting = self._waiting, []
            for here in waiting:
                if not here.done():
                    here.set_result(None)


class TurnEngine(ReplayEngine):
    """Makes turns of the work's length; in lock-step for all together, and gives them to all together."""

    def __init__(self, engine: Engine, work: Work, lock_step: LockStep | None) -> None:
        super().__init__(engine, None)
        self._work, self._lock_step = work, lock_step

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        assert begun is None  # the actors of a bench hand nothing over
        if self._lock_step is not None:
            await self._lock_step.meet()
        turn = dataclasses.replace(
            sampling, max_tokens=self._work.turn_tokens, min_tokens=0, ignore_eos=True, stop_token_ids=()
        )
        sample = await super().sample(prompt_tokens, turn, request_id=request_id, priority=priority)
        if self._lock_step is not None:
            await self._lock_step.meet()
        return dataclasses.replace(sample, finish="stop")


class EpisodeEngine(ReplayEngine):
    """An `Engine` whose responses are episodes."""

    def __init__(self, engine: Engine, work: Work, rendering: ChatRenderer, *, max_context_tokens: int) -> None:
        """Turns are sampled by `engine`; zygotes start with the first episode."""
        super().__init__(engine, None)
        self._work = work
        self._lock_step = LockStep(work.lock_step) if work.lock_step else None
        config = EnvironmentsConfig(max_turns=work.num_turns)
        self.pool = EnvironmentPool(config, own=(work.environment,))
        turns: Any = TurnEngine(engine, work, self._lock_step)
        self._episodes = Episodes(turns, self.pool, rendering, config, max_context_tokens=max_context_tokens)

    async def load(self) -> None:
        """Has the environment's zygote import it."""
        await self.pool.load(self._work.environment)

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        assert begun is None  # the actors of a bench hand nothing over
        index, _, _ = request_id.split(".")[1].partition("+")  # one begun anew has its number after that
        request = EpisodeRequest(
            environment=self._work.environment,
            prompt_tokens=prompt_tokens,
            row={"latencies_s": self._work.latencies_s(prompt_tokens, int(index))},
            sampling=sampling,
            request_id=request_id,
            priority=priority,
        )
        with contextlib.ExitStack() as batch:
            if self._lock_step is not None:
                batch.callback(self._lock_step.leave)
            return await self._episodes.play(request)

    async def close(self) -> None:
        """Ends the environments; the engine is left to its owner."""
        await self._episodes.close()
        await self.pool.close()
