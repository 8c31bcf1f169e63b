"""An engine whose turns are written down, and a pool whose environments are."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET

from actor.engine_protocol import Sample
from actor.environments import wire
from actor.environments.protocol import EpisodeError
from bridge.rollout_types import Finish, Sampling, Version


@dataclasses.dataclass
class Turn:
    """What the engine samples; cut off where it is longer than what was asked for."""

    tokens: Sequence[int]
    step: int = 0
    """Of the weights."""
    routing: int | None = None
    """The one expert of all tokens of its request, if that was captured."""


@dataclasses.dataclass
class Request:
    tokens: np.ndarray
    sampling: Sampling
    request_id: str
    priority: int


class ScriptedEngine:
    """Plays the same turns to each attempt at an episode, which is known by the request's id up to the last dot."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns, self.requests = turns, list[Request]()
        self.hangs = False
        self.cancelled: list[str] = []

    async def sample(self, prompt_tokens, sampling, *, request_id, priority) -> Sample:
        self.requests.append(Request(prompt_tokens.copy(), sampling, request_id, priority))
        attempt, _, turn = request_id.rpartition(".")
        script = self.turns[int(turn)]
        try:
            await (asyncio.Event().wait() if self.hangs else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        tokens = np.asarray(script.tokens[: sampling.max_tokens], np.int32)
        finish: Finish = "stop" if tokens[-1] in sampling.stop_token_ids else "length"
        num_inputs = prompt_tokens.size + tokens.size - 1
        return Sample(
            tokens=tokens,
            logprobs=np.linspace(-2, -1, tokens.size, dtype=np.float32),
            token_versions=(Version(incarnation=1, step=script.step),) * tokens.size,
            finish=finish,
            routed_experts=UNSET if script.routing is None else np.full((num_inputs, 1, 1), script.routing, np.uint8),
        )


class ScriptedProcess:
    def __init__(self, pool: "ScriptedPool") -> None:
        self._pool, self._steps = pool, iter(pool.steps)

    async def reset(self, row: Mapping[str, Any]) -> wire.Observed:
        self._pool.rows.append(row)
        self._pool.maybe_fail("reset")
        return wire.Observed(messages=self._pool.start, roles=["user"], sees_thinking=self._pool.sees_thinking)

    async def step(self, action: str) -> wire.Observed:
        self._pool.actions.append(action)
        self._pool.maybe_fail("step")
        return next(self._steps)


class ScriptedPool:
    """`failures`: what goes wrong, in order, once for each attempt that gets there."""

    def __init__(self, steps: Sequence[wire.Observed], *, start: list[dict[str, str]] | None = None) -> None:
        self.steps, self.start = steps, start or []
        self.rows: list[Mapping[str, Any]] = []
        self.actions: list[str] = []
        self.failures: list[str] = []
        self.num_opened = self.num_closed = 0
        self.sees_thinking = False

    def maybe_fail(self, where: str) -> None:
        if self.failures and self.failures[0] == where:
            self.failures.pop(0)
            raise EpisodeError(f"the environment broke at {where}")

    @contextlib.asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[ScriptedProcess]:
        self.num_opened += 1
        try:
            self.maybe_fail("open")
            yield ScriptedProcess(self)
        finally:
            self.num_closed += 1


def observed(text: str = "", *, reward: float = 0.0, done: bool = False) -> wire.Observed:
    return wire.Observed(messages=[{"role": "user", "content": text}] if text else [], reward=reward, done=done)
