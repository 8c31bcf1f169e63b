"""The real engine, asked for responses of lengths drawn beforehand, and rewards that cost nothing."""

import asyncio
import contextlib
import dataclasses
import hashlib
import heapq
import itertools
import pathlib
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from jaxtyping import Int32

from actor.engine_protocol import Engine, PartialSample, Sample, SwapTimings
from actor.rewards.scorer import RewardResult
from actor.rewards.types import Response
from actor.rewards.verifiers.judge import JudgeCounts
from bridge.rollout_types import RewardScore, Sampling, Task
from bridge.weight_types import WeightManifest
from tests.bench.rig.lengths import Lengths


class Places:
    """So many requests in service at once; the others wait here, the lowest priority first, as in vLLM's own queue."""

    def __init__(self, num: int) -> None:
        self._num_free = num
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._entries = itertools.count()

    @contextlib.asynccontextmanager
    async def take(self, priority: int) -> AsyncGenerator[None]:
        """One of them, as long as the block takes."""
        await self._wait(priority)
        try:
            yield
        finally:
            self._give_back()

    async def _wait(self, priority: int) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._entries), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came at this very moment
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


class ReplayEngine:
    """An `Engine` that ends each response at its drawn length, if there are any; all else is the engine's below.

    To the actor it ends as by a stop token, or by the limit where the length is all that the ticket allows. The engine
    is made to end it by `max_tokens` with `ignore_eos`, and nothing forbids a token: `min_tokens` would mask the end
    tokens' logits, and the logprobs would be another distribution's than the learner's.
    """

    def __init__(self, engine: Engine, lengths: Lengths | None, *, places: int | None = None) -> None:
        """Wraps `engine`, as one of `places` sequences if that is given; closing it is left to its owner."""
        self._engine: Any = engine
        self._lengths = lengths
        self._places = Places(places) if places is not None else None
        self._swap: asyncio.Task[SwapTimings] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def sample(
        self,
        prompt_tokens: Int32[np.ndarray, " P"],
        sampling: Sampling,
        *,
        request_id: str,
        priority: int,
        begun: PartialSample | None = None,
    ) -> Sample:
        length = sampling.max_tokens
        replayed = sampling
        if self._lengths is not None:
            index, _, _ = request_id.split(".")[1].partition("+")  # one begun anew has its number after that
            length = self._lengths.tokens(prompt_tokens, int(index))
            replayed = dataclasses.replace(
                sampling, max_tokens=min(length, sampling.max_tokens), min_tokens=0, ignore_eos=True, stop_token_ids=()
            )
        async with self._places.take(priority) if self._places is not None else contextlib.nullcontext():
            sample = await self._engine.sample(
                prompt_tokens, replayed, request_id=request_id, priority=priority, begun=begun
            )
        if self._lengths is None:
            return sample
        return dataclasses.replace(sample, finish="stop" if length < sampling.max_tokens else "length")

    async def swap_weights(self, path: pathlib.Path, manifest: WeightManifest) -> SwapTimings:
        swap = self._swap = asyncio.ensure_future(self._engine.swap_weights(path, manifest))
        return await asyncio.shield(swap)

    async def settle(self) -> None:
        """Waits for a swap whose actor was stopped in the middle: the engine must not be left paused."""
        if self._swap is not None:
            await self._swap


class HashRewards:
    """Rewards 0 and 1, as likely, by a hash of the response: groups have variance, and no verifier takes time.

    But those of a share of the prompts, told by a hash too, are all 1: their groups teach nothing.
    """

    def __init__(self, flat_share: float = 0.0) -> None:
        """`flat_share` is of the prompts."""
        self._flat_share = flat_share

    num_failures = 0
    judge_counts = JudgeCounts()

    def begin(self, task: Task) -> None:
        """No timeouts are to be known."""

    async def score(self, response: Response, task: Task) -> RewardResult:
        """As `actor.rewards.scorer.RewardScorer` does."""
        digest = hashlib.blake2b((task.answer + response.text).encode(), digest_size=1).digest()
        value = 1.0 if self.is_flat(task.answer) else float(digest[0] & 1)
        return RewardResult(
            reward=value, scores=(RewardScore(name="hash", value=value, verdict="ok" if value else "wrong"),)
        )

    def is_flat(self, answer: str) -> bool:
        """Whether a prompt, told by what its answer is judged by, has rewards that are all alike."""
        digest = hashlib.blake2b(answer.encode(), digest_size=4, person=b"flat").digest()
        return int.from_bytes(digest, "little") < self._flat_share * 2**32

    async def close(self) -> None:
        """Nothing is open."""
