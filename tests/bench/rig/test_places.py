"""A session's engine may be smaller than the one that runs."""

import asyncio

import numpy as np
import pytest

from bridge.rollout_types import Sampling
from tests.bench.rig.replay import ReplayEngine


class Served:
    """An engine that says who is in it, and ends a request when it is told to."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.most = 0
        self._ends: dict[str, asyncio.Event] = {}

    async def sample(self, prompt_tokens, sampling, *, request_id, priority):
        self.inside.append(request_id)
        self.most = max(self.most, len(self.inside))
        end = self._ends[request_id] = asyncio.Event()
        try:
            await end.wait()
        finally:
            self.inside.remove(request_id)

    async def end(self, request_id: str) -> None:
        self._ends[request_id].set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def start(engine: ReplayEngine, request_id: str, priority: int) -> asyncio.Task:
    asked = engine.sample(np.ones(2, np.int32), Sampling(max_tokens=5), request_id=request_id, priority=priority)
    return asyncio.create_task(asked)


def test_places_let_the_lowest_priority_in_next_and_never_more_than_there_are():
    async def scenario():
        served = Served()
        engine = ReplayEngine(served, None, places=2)  # pyright: ignore[reportArgumentType]
        tasks = [start(engine, name, priority) for name, priority in zip("abcde", (9, 8, 7, 3, 5), strict=True)]
        await settle()
        seen = [list(served.inside)]
        for ended in ("a", "d", "b", "e", "c"):
            await served.end(ended)
            seen.append(list(served.inside))
        await asyncio.gather(*tasks)
        return seen, served.most

    seen, most = asyncio.run(scenario())
    # "a" and "b" came first; then by priority: d (3), e (5), c (7).
    assert seen == [["a", "b"], ["b", "d"], ["b", "e"], ["e", "c"], ["c"], []]
    assert most == 2


@pytest.mark.parametrize("cancelled", ["waiting", "inside"])
def test_places_are_not_lost_with_a_request_that_is_cancelled(cancelled):
    async def scenario():
        served = Served()
        engine = ReplayEngine(served, None, places=1)  # pyright: ignore[reportArgumentType]
        tasks = {name: start(engine, name, priority) for name, priority in (("a", 0), ("b", 1), ("c", 2))}
        await settle()
        gone = {"waiting": "b", "inside": "a"}[cancelled]
        tasks[gone].cancel()
        await settle()
        left = [name for name in "abc" if name != gone]
        for name in left:
            assert served.inside == [name]
            await served.end(name)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return served.inside

    assert asyncio.run(scenario()) == []
