"""Leases of what an actor serves: kept, lost, and taken back by the learner."""

import asyncio
import threading

import numpy as np
import pytest

from actor.loop import ActorLimits
from tests.actor.fakes import until
from tests.actor.loop_setup import make_setup

SHORT = ActorLimits(lease_s=0.3, heartbeat_s=0.01)


async def test_leases_of_served_tickets_are_renewed(tmp_path, monkeypatch):
    s = make_setup(tmp_path, limits=SHORT)
    s.publish(0)
    s.put(0, 1)

    def first_expiry_s() -> float:
        return s.store._read("SELECT min(lease_expires_s) FROM tickets WHERE run = :run")[0][0]

    async with s.serving():
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        monkeypatch.setattr(s.store, "claim", lambda *args, **kwargs: [])  # a claim would lease them anew
        claimed_until_s = first_expiry_s()
        await until(lambda: first_expiry_s() > claimed_until_s + 2 * SHORT.lease_s, "leases two lengths longer")
        assert set(s.actor.held) == {"t0", "t1"}


async def test_a_lease_found_lost_at_its_renewal_ends_its_group(tmp_path, monkeypatch):
    s = make_setup(tmp_path, limits=SHORT)
    monkeypatch.setattr(s.store, "leased", lambda name: set(s.actor.held))  # only the renewal may notice
    s.publish(0)
    s.put(0, 1)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        s.store.release("actor-0", ["t0"])
        assert [t.id for t in s.store.claim("thief", limit=1, lease_s=99.0)] == ["t0"]
        await s.runs("t1.0", "t1.1")
        assert set(s.actor.held) == {"t1"}


async def test_lease_that_ends_while_its_group_is_stored_brings_the_ticket_back_for_nothing(tmp_path):
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


async def test_a_withdrawn_tickets_requests_are_aborted_and_its_slot_is_free(tmp_path):
    s = make_setup(tmp_path, width=1)
    s.publish(0)
    s.put(0, 1)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.store.withdraw(["t0"])
        await s.runs("t1.0", "t1.1")
        assert list(s.actor.held) == ["t1"]


async def test_a_ticket_replaced_while_it_is_served_is_served_anew(tmp_path):
    s = make_setup(tmp_path, width=1)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.store.withdraw(["t0"])
        s.put(0, prompt_tokens=np.array([5], np.int32))
        await until(lambda: [list(t.prompt_tokens) for t in s.actor.held.values()] == [[5]], "the new prompt")
        await s.runs("t0.0", "t0.1")


@pytest.mark.parametrize("last_first", [False, True])
async def test_a_sample_that_ends_in_the_moment_its_ticket_is_withdrawn_does_no_harm(tmp_path, last_first):
    s = make_setup(tmp_path, width=1)
    s.publish(0)
    s.put(0, 1)
    async with s.serving() as serving:
        await s.runs("t0.0", "t0.1")
        if last_first:
            s.engine.finish("t0.1")
        s.engine.finish("t0.0")  # its task is ready to run, and has not yet
        s.store.withdraw(["t0"])
        s.actor.forget("t0")
        await s.runs("t1.0", "t1.1")
        assert not serving.done() and s.groups() == []


async def test_a_ticket_put_anew_waits_for_the_end_of_the_one_it_replaces(tmp_path, monkeypatch):
    """The engine's abort takes a while, and the new ticket is claimed meanwhile, under the same id."""
    s = make_setup(tmp_path, width=2)
    monkeypatch.setattr(s.store, "leased", lambda name: set(s.actor.held))  # only the claim may notice
    s.publish(0)
    s.put(0)
    async with s.serving() as serving:
        await s.runs("t0.0", "t0.1")
        s.engine.abort_ends = asyncio.Event()
        s.store.withdraw(["t0"])
        s.put(0, prompt_tokens=np.array([5], np.int32))
        await until(lambda: len(s.engine.aborted) == 2, "the abort")
        await until(lambda: s.store.counts()["claimed"] == 1, "the claim")
        s.engine.abort_ends.set()
        await until(lambda: "t0" in s.actor.held and len(s.running()) == 2, "the new one runs")
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await until(lambda: len(s.groups()) == 1, "the group")
        assert not serving.done()
    assert s.groups()[0].prompt_tokens.tolist() == [5]
