"""What the store tells is acted upon at once: nothing else looks within the test's time."""

import asyncio

import pytest

from actor import background, loop, weight_updates
from bridge.rollout_types import Version
from bridge.weight_types import Announcement
from tests.actor.fakes import until
from tests.actor.loop_setup import make_setup

NEVER_S = 1000.0


@pytest.fixture(autouse=True)
def no_looks(monkeypatch):
    monkeypatch.setattr(loop, "CLAIM_S", NEVER_S)
    monkeypatch.setattr(background, "LEASED_S", NEVER_S)
    monkeypatch.setattr(weight_updates, "ANNOUNCED_S", NEVER_S)


async def test_ticket_that_is_put_is_claimed_and_one_that_is_withdrawn_is_aborted(tmp_path):
    s = make_setup(tmp_path, width=1)
    s.publish(0)
    async with s.serving():
        await s.served(Version(incarnation=0, step=0))
        s.put(0)
        await s.runs("t0.0", "t0.1")
        s.store.withdraw(["t0"])
        await s.runs()
        s.put(1)
        await s.runs("t1.0", "t1.1")


async def test_version_that_is_announced_is_served(tmp_path):
    s = make_setup(tmp_path)
    async with s.serving():
        await until(lambda: bool(s.store.heartbeats()), "it serves")
        for step in range(3):
            version = s.publish(step)
            manifest = await s.actor.weights._source.announced()
            assert manifest is not None
            s.store.announce(Announcement(manifest=manifest, sources=()))
            await s.served(version)


async def test_fence_is_noticed_and_lifted(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    async with s.serving():
        await s.served(Version(incarnation=0, step=0))
        s.store.fence("actor-0", "off by 2.2")
        await until(lambda: len(s.engine.swapped) == 2, "it started over")
        s.store.unfence("actor-0")
        s.put(0)
        await s.runs("t0.0", "t0.1")


async def test_actor_that_is_cancelled_ends_while_its_thread_waits_for_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "WAIT_S", 0.1)
    s = make_setup(tmp_path)
    s.publish(0)
    async with s.serving() as task:
        await s.served(Version(incarnation=0, step=0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
