"""A real vLLM engine and the learner's turn on its devices."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from bridge.device_turns import LEARNER, TrainerTurn
from tests.integration.support.engines import Bench, EngineKind, for_engines

pytestmark = [pytest.mark.integration, pytest.mark.engine]


class Waits(Exception):  # noqa: N818
    """The learner has to wait."""


def taken_at_once(turn: TrainerTurn) -> bool:
    def waits() -> None:
        raise Waits

    try:
        turn.take(waits)
    except Waits:
        return False
    turn.give_back()
    return True


@for_engines([EngineKind(prefix_caching=True)])
def test_workers_have_the_devices_but_while_the_engine_sleeps(bench: Bench, tmp_path: Path):
    """Although no actor holds them: one that was killed does not, while its workers still end."""
    learner = TrainerTurn(tmp_path)

    async def body():
        await bench.engine.share_devices(tmp_path, LEARNER)
        assert not await asyncio.to_thread(taken_at_once, learner)
        await bench.engine.sleep()
        assert await asyncio.to_thread(taken_at_once, learner)
        await bench.engine.wake_up()
        assert not await asyncio.to_thread(taken_at_once, learner)
        await bench.update()
        return await bench.sample(np.array([20, 21, 22], np.int32))

    assert bench.run(body()).tokens.size == 24
    learner.close()


@pytest.mark.gpu
@for_engines([EngineKind(prefix_caching=True, colocated=True)])
def test_engine_that_sleeps_frees_most_of_its_memory_and_samples_as_before_when_it_wakes(bench: Bench):
    prompt = np.array([20, 21, 22], np.int32)

    async def body():
        await bench.update(seed=1)
        before = await bench.sample(prompt, temperature=0.0)
        awake, _ = torch.cuda.mem_get_info()
        await bench.engine.sleep()
        asleep, total = torch.cuda.mem_get_info()
        await bench.engine.wake_up()
        await bench.update(seed=1)
        after = await bench.sample(prompt, temperature=0.0)
        return before, after, (asleep - awake) / total

    before, after, freed = bench.run(body())
    assert freed > 0.8 * bench.config.actor.gpu_memory_utilization
    np.testing.assert_array_equal(before.tokens, after.tokens)
    np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-5)
