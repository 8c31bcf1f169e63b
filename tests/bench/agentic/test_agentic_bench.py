"""The parts of the bench of episodes that are not the system's own."""

import asyncio
import statistics
from typing import Any

import numpy as np
import pytest

from bridge.rollout_types import Sampling, Version
from launch.tools.plan.sim.episodes import draw_latencies_s
from launch.tools.plan.workload import LatencyProfile
from tests.actor.environments.chat import rendering
from tests.bench.agentic.setups import (
    engine_profile,
)
from tests.bench.agentic.sleeping import NAME
from tests.bench.rig.episodes import EpisodeEngine, LockStep
from tests.bench.rig.lengths import Work
from tests.bench.rig.paced_engine import PacedEngine

PROMPT = np.array([1, 2, 3], np.int32)


def work(**fields) -> Work:
    given: dict[str, Any] = dict(environment=NAME, num_turns=3, turn_tokens=4, mean_s=0.0, deviation_s=0.0)
    return Work(**(given | fields))


def test_latencies_of_the_rig_are_distributed_as_the_planner_draws_them():
    mine = [
        x
        for n in range(400)
        for x in work(num_turns=5, mean_s=0.1, deviation_s=0.1).latencies_s(np.array([n], np.int32), 1)
    ]
    theirs = draw_latencies_s(LatencyProfile(mean_s=0.1, deviation_s=0.1), 2000, key=(1,))
    assert min(mine) >= 0
    for p in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(mine, p) == pytest.approx(np.quantile(theirs, p), abs=0.02)
    assert statistics.fmean(mine) == pytest.approx(0.1288, abs=0.005)  # a normal of 0.1 and 0.1 without its negatives


def test_lock_step_goes_on_when_all_that_have_not_left_are_there():
    async def run() -> list[str]:
        lock, seen = LockStep(3), []

        async def episode(name: str, num_turns: int) -> None:
            for turn in range(num_turns):
                await lock.meet()
                seen.append(f"{turn}{name}")
            lock.leave()

        for _ in range(2):  # one batch, then another
            async with asyncio.TaskGroup() as batch:
                for name, num in (("a", 3), ("b", 1), ("c", 2)):
                    batch.create_task(episode(name, num))
        return seen

    seen = asyncio.run(run())
    assert [s[0] for s in seen] == ["0", "0", "0", "1", "1", "2"] * 2


def played(lock_step: int, num: int, **fields):
    """So many episodes at once, in real processes; what the engine was asked, with what was in it then."""
    log: list[tuple[str, int]] = []

    async def run():
        paced = PacedEngine(engine_profile(), version=Version(incarnation=0, step=0))
        ask = paced.sample

        async def sample(prompt_tokens, sampling, *, request_id, priority, begun=None):
            log.append((request_id, prompt_tokens.size))
            return await ask(prompt_tokens, sampling, request_id=request_id, priority=priority)

        paced.sample = sample
        engine = EpisodeEngine(paced, work(lock_step=lock_step, **fields), rendering(""), max_context_tokens=1000)
        await engine.load()
        try:
            return await asyncio.gather(
                *(
                    engine.sample(PROMPT, Sampling(max_tokens=100), request_id=f"000000000.{i}", priority=0)
                    for i in range(num)
                )
            )
        finally:
            await engine.close()

    return asyncio.run(run()), log


def test_episode_on_the_rig_is_turns_of_the_given_length_with_observations_between():
    (sample,), log = played(0, 1)
    assert sample.episode is not None and sample.finish == "stop" and sample.num_sampled == 12
    assert sample.episode.sampled.tolist() == [True] * 4 + [False] + [True] * 4 + [False] + [True] * 4
    assert [size for _, size in log] == [3, 8, 13]


def test_batch_in_lock_step_asks_for_a_turn_of_all_before_the_next_of_any():
    samples, log = played(4, 4, mean_s=0.01, deviation_s=0.02)
    assert len(samples) == 4
    assert [size for _, size in log] == [3] * 4 + [8] * 4 + [13] * 4
