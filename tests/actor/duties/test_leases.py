"""Leases of what an actor serves."""

import asyncio
import threading

from actor.loop import Limits
from tests.actor.fakes import until
from tests.actor.loop_setup import make_setup, run


def test_leases_are_renewed_and_a_lost_one_ends_its_group(tmp_path):
    async def body():
        s = make_setup(tmp_path, limits=Limits(lease_s=1.0, heartbeat_s=0.01))
        s.publish(0)
        s.put(0, 1)

        def taken_over() -> bool:
            s.store.release("actor-0", ["t0"])
            return bool(s.store.claim("thief", limit=1, lease_s=99.0))

        async with s.serving():
            await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
            end = asyncio.get_running_loop().time() + 3 * 1.0
            while asyncio.get_running_loop().time() < end:  # three leases long
                assert s.store.claim("thief", limit=9, lease_s=9.0) == []
                await asyncio.sleep(0.02)
            await until(taken_over, "another actor has the ticket")
            await s.runs("t1.0", "t1.1")
            assert set(s.actor.held) == {"t1"}

    run(body())


def test_lease_that_ends_while_its_group_is_stored_brings_the_ticket_back_for_nothing(tmp_path):
    async def body():
        s = make_setup(tmp_path, auto=True)
        s.publish(0)
        s.put(0)
        put_group, claim, claimed_again = s.store.put_group, s.store.claim, threading.Event()

        def put_late(group):
            s.store.release("actor-0", [group.ticket_id])  # as if the lease had run out
            claimed_again.clear()
            assert claimed_again.wait(30), "nobody claimed it"
            return put_group(group)

        def spy(*args, **kwargs):
            tickets = claim(*args, **kwargs)
            if tickets:
                claimed_again.set()
            return tickets

        s.store.put_group, s.store.claim = put_late, spy
        async with s.serving():
            await until(lambda: bool(s.groups()), "the group")
            await until(lambda: s.actor.num_groups == 0, "nothing is served any more")
        assert s.engine.num_finished == 2  # its two samples, once

    run(body())
