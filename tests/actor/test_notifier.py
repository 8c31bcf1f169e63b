"""A bell, in one event loop."""

import asyncio

import pytest

from actor.notifier import Notifier
from tests.actor.fakes import until


async def test_after_a_ring_since_the_count_was_taken_returns_at_once():
    bell = Notifier()
    count = bell.count
    bell.notify()
    await bell.wait_past(count, timeout_s=1000.0)


async def test_after_wakes_everybody_who_waits():
    bell, woken = Notifier(), []

    async def wait(name: str) -> None:
        await bell.wait_past(bell.count, timeout_s=1000.0)
        woken.append(name)

    tasks = [asyncio.create_task(wait(n)) for n in "ab"]
    await asyncio.sleep(0)
    assert woken == []
    bell.notify()
    await until(lambda: sorted(woken) == ["a", "b"], "both wake")
    await asyncio.gather(*tasks)


async def test_after_without_a_ring_returns_when_the_time_is_up():
    bell = Notifier()
    await bell.wait_past(bell.count, timeout_s=0.01)
    assert bell.count == 0


async def test_after_that_is_cancelled_ends():
    bell = Notifier()
    task = asyncio.create_task(bell.wait_past(bell.count, timeout_s=1000.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
