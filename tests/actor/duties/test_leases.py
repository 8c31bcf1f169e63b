"""Leases of what an actor serves."""

import asyncio

from actor.loop import Limits
from tests.actor.loop_setup import make_setup, run, ticket
from tests.bridge.factories import make_group


def test_leases_are_renewed_and_a_lost_one_ends_its_group(tmp_path):
    async def body():
        s = make_setup(tmp_path, limits=Limits(lease_s=1.0, heartbeat_s=0.01))
        s.publish(0)
        s.put(0, 1)
        async with s.serving():
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            end = asyncio.get_running_loop().time() + 3 * 1.0
            while asyncio.get_running_loop().time() < end:  # three leases long
                assert s.store.claim("thief", limit=9, lease_s=9.0) == []
                await asyncio.sleep(0.02)
            s.store.put_group(make_group(ticket(0), actor="thief"))
            await s.runs("t1.0", "t1.1")
            assert set(s.actor.held) == {"t1"}

    run(body())
