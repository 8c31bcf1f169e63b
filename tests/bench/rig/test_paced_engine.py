"""The paced engine keeps the time of its profile; the loop's clock is the test's."""

import asyncio
import heapq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.rollout_types import Sampling, Version
from launch.tools.plan.profile import EngineProfile
from tests.bench.rig.paced_engine import PacedEngine, _token_versions

PROMPT = np.array([5, 6, 7], np.int32)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time is that of the next call: nothing waits."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # pyright: ignore[reportAttributeAccessIssue]
            scheduled = self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if scheduled:
                self._now_s = max(self._now_s, scheduled[0]._when)
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]


def run(scenario) -> Any:
    """Runs `scenario(engine, clock)` on an engine of 10 tokens/s a sequence, from two on 20 together; 3 places."""
    loop = VirtualLoop()
    try:
        profile = EngineProfile(running=(1.0, 2.0), tokens_per_s=(10.0, 20.0), max_num_seqs=3)
        engine = PacedEngine(profile, pause_s=2.0, clock=loop.time)
        return loop.run_until_complete(scenario(engine, loop.time))
    finally:
        loop.close()


async def ended_at(engine, clock, request_id, tokens, *, priority=0) -> tuple[float, Any]:
    sample = await engine.sample(PROMPT, Sampling(max_tokens=tokens), request_id=request_id, priority=priority)
    return clock(), sample


def weights(step: int) -> Any:
    return SimpleNamespace(version=Version(incarnation=1, step=step))


def test_responses_end_when_the_profile_says_and_are_as_long_as_asked():
    async def scenario(engine, clock):
        await engine.swap_weights(Path(), weights(7))
        # Three at 20/3 tokens/s each until 3.0 s later, then two at 10, then one.
        return await asyncio.gather(*(ended_at(engine, clock, f"1.{i}", n) for i, n in enumerate((20, 40, 50))))

    found = run(scenario)
    assert [at for at, _ in found] == pytest.approx([2 + 3.0, 2 + 3.0 + 2.0, 2 + 3.0 + 2.0 + 1.0])
    assert [s.tokens.size for _, s in found] == [20, 40, 50]
    assert {v for _, s in found for v in s.token_versions} == {Version(incarnation=1, step=7)}
    assert all(set(s.tokens) <= set(PROMPT) and (s.logprobs < 0).all() for _, s in found)
    assert not np.array_equal(found[0][1].tokens, found[1][1].tokens[:20])  # samples of a prompt differ


def test_a_request_waits_for_a_place_in_the_order_of_priorities():
    async def scenario(engine, clock):
        await engine.swap_weights(Path(), weights(0))
        first = [asyncio.create_task(ended_at(engine, clock, f"0.{i}", 20)) for i in range(3)]
        await asyncio.sleep(0.5)
        late = [asyncio.create_task(ended_at(engine, clock, f"{p}.0", 10, priority=p)) for p in (9, 4, 8, 5)]
        await asyncio.sleep(0.1)
        stats = engine.stats
        await asyncio.gather(*first)
        return stats, [(await task)[0] for task in late]

    stats, ends = run(scenario)
    assert (stats.num_running, stats.num_waiting) == (3, 4)
    assert ends[0] > ends[1] == ends[2] == ends[3]  # 4, 5 and 8 start together, 9 last


def test_a_cancelled_request_leaves_its_place():
    async def scenario(engine, clock):
        await engine.swap_weights(Path(), weights(0))
        lost, kept = (asyncio.create_task(ended_at(engine, clock, f"{i}.0", 30)) for i in range(2))
        await asyncio.sleep(1.0)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        return engine.stats.num_running, (await kept)[0]

    assert run(scenario) == (1, pytest.approx(2.0 + 3.0))


def test_new_weights_stop_the_engine_and_are_behind_the_tokens_that_follow():
    async def scenario(engine, clock):
        await engine.swap_weights(Path(), weights(3))
        one = asyncio.create_task(ended_at(engine, clock, "0.0", 30))
        await asyncio.sleep(1.0)
        timings = await engine.swap_weights(Path(), weights(4))
        return timings.pause_s, await one

    pause_s, (end_s, sample) = run(scenario)
    assert pause_s == 2.0 and end_s == pytest.approx(2.0 + 1.0 + 2.0 + 2.0)
    assert [v.step for v in sample.token_versions] == [3] * 10 + [4] * 20


def test_a_token_that_an_update_split_belongs_to_the_weights_that_made_more_of_it():
    finished: Any = SimpleNamespace(spans=[(0, 1.4), (1, 2.6)])
    assert _token_versions(finished, 4) == [0, 1, 1, 1]
