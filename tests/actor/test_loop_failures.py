"""The loop when something fails or ends: verifiers, engines, leases, cancellation."""

import asyncio
import contextlib
import dataclasses
import sys
import threading

import numpy as np
import pytest

from actor.engine_protocol import EngineDeadError
from bridge import timeline
from bridge.rollout_types import Task, Version
from bridge.store.store_types import PERMANENT, FencedError, StoreLostError
from tests.actor.fakes import until
from tests.actor.loop_setup import LIMITS, ended, make_setup, ticket
from tests.bridge.factories import make_group


@pytest.mark.heavy
async def test_verifier_that_fails_drops_the_group_and_reissues_its_ticket(tmp_path):
    command = (sys.executable, "-m", "tests.actor.rewards.verifiers.bad_verifiers", str(tmp_path / "attempts"))
    s = make_setup(tmp_path, auto=True, command=command)
    s.engine.reply = np.frombuffer(b"1", np.uint8).astype(np.int32)
    s.publish(0)
    s.put(0, task=Task.judged_by("raise", answer="a"))
    async with s.serving():
        await until(lambda: bool(s.groups()), "the second attempt's group")
        await until(lambda: s.report().num_dropped_groups == 1, "it is told")
    assert [r.reward for r in s.groups()[0].rollouts] == [0.5, 0.5]
    assert s.store.counts()["reissued"] == s.actor.serving.tally.num_dropped == 1
    assert [e["args"]["ticket"] for e in timeline.read(tmp_path / "events") if e["name"] == "dropped"] == ["t0"]


@pytest.mark.heavy
async def test_verifier_that_never_works_ends_the_actor(tmp_path, monkeypatch):
    monkeypatch.setattr("actor.circuit_breaker.MIN_ROWS", 3)
    monkeypatch.setattr("actor.circuit_breaker.MIN_S", 0.0)
    s = make_setup(tmp_path, auto=True)
    s.publish(0)
    for order in range(3):
        s.put(order, task=Task.judged_by("nope", answer=str(order)))
    async with s.serving() as task:
        error = await ended(task)
    assert isinstance(error, RuntimeError) and "3 groups of 3 rows in a row" in str(error)
    assert s.groups() == []


async def test_cancelled_loop_aborts_requests_and_gives_its_tickets_back(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    s.put(0, 1, 2)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
    assert s.running() == [] and len(s.engine.aborted) == 4
    assert s.store.counts()["open"] == 3
    assert {t.id for t in s.store.claim("other", limit=9, lease_s=9)} == {"t0", "t1", "t2"}


async def test_ticket_claimed_while_the_loop_is_cancelled_is_given_back(tmp_path, monkeypatch):
    s = make_setup(tmp_path)
    s.publish(0)
    claimed, go_on = threading.Event(), threading.Event()
    claim = s.store.claim

    def slow_claim(*args, **kwargs):
        tickets = claim(*args, **kwargs)
        if tickets:
            claimed.set()
            assert go_on.wait(30)
        return tickets

    monkeypatch.setattr(s.store, "claim", slow_claim)
    s.put(0)
    async with s.serving():
        await until(claimed.is_set, "the store has leased it")
        asyncio.get_running_loop().call_soon(go_on.set)  # after the cancellation that ends this block
    assert s.store.counts()["open"] == 1


async def test_ticket_withdrawn_while_it_is_served_is_forgotten(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    s.put(0)
    async with s.serving() as task:
        await s.runs("t0.0", "t0.1")
        s.store.withdraw(["t0"])
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await until(lambda: not s.actor.num_groups, "the group ended")
        assert not task.done()
        assert s.actor.serving.tally.num_emitted == 0


async def test_ticket_forgotten_before_its_first_request_frees_its_place(tmp_path, monkeypatch):
    s = make_setup(tmp_path, width=1)
    admit = s.actor.admission.admit

    def admit_and_lose(version):
        tickets = admit(version)
        for t in tickets:
            if t.id == "t0":
                s.store.withdraw(["t0"])
                # Runs before the task that serves the ticket does.
                asyncio.get_running_loop().call_soon(s.actor.forget, t.id)
        return tickets

    monkeypatch.setattr(s.actor.admission, "admit", admit_and_lose)
    s.publish(0)
    s.put(0, 1)
    async with s.serving():
        await s.runs("t1.0", "t1.1")
        assert s.actor.num_groups == 1


async def test_actor_fenced_for_good_ends(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    async with s.serving() as task:
        await s.served(Version(incarnation=0, step=0))
        s.store.fence("actor-0", f"{PERMANENT}off by 2.2")
        error = await ended(task)
    assert isinstance(error, FencedError) and "for good: off by 2.2" in str(error)


async def test_fenced_actor_drops_all_it_has_fetches_its_weights_anew_and_serves_only_probes(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    s.put(0)
    async with s.serving() as task:
        await s.runs("t0.0", "t0.1")
        s.store.fence("actor-0", "off by 2.2")
        await until(lambda: s.engine.swapped == [Version(incarnation=0, step=0)] * 2, "the same version, anew")
        assert s.running() == [] and sorted(s.engine.aborted) == ["t0.0", "t0.1"] and not s.actor.held
        s.store.put_tickets([ticket(-1, kind="probe")], only_for="actor-0")
        await s.runs("t-1.0", "t-1.1")
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: len(s.groups("probe")) == 1, "the probe's answer")
        assert s.store.counts()["open"] == 1 and not task.done()  # t0 is for others
        s.store.unfence("actor-0")
        await s.runs("t0.0", "t0.1")
    assert len(s.engine.swapped) == 2


async def test_probe_offered_before_the_fence_was_noticed_waits_until_the_actor_is_clean(tmp_path):
    s = make_setup(tmp_path, width=1)
    s.publish(0)
    async with s.serving():
        await s.served(Version(incarnation=0, step=0))
        s.engine.hang_swaps = True
        s.store.fence("actor-0", "off by 2.2")
        s.store.put_tickets([ticket(-1, kind="probe")], only_for="actor-0")
        await until(lambda: s.actor.fence.must_restart, "the fence is noticed")
        await until(lambda: s.actor.weights.is_swapping, "it fetches its weights anew")
        assert s.running() == []


async def test_actor_that_is_off_again_starts_over_again(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    async with s.serving():
        await s.served(Version(incarnation=0, step=0))
        for number in range(1, 4):
            s.store.fence("actor-0", f"off by {number}")
            await until(lambda n=number: len(s.engine.swapped) == 1 + n, "anew")


async def test_group_that_is_on_its_way_when_the_actor_is_fenced_has_arrived_before_it_starts_over(
    tmp_path, monkeypatch
):
    """Or it might arrive after the actor was let in, made by what it was fenced for."""
    s = make_setup(tmp_path)
    put_group, go_on = s.store.put_group, threading.Event()
    seen = []

    def slow_put(group):
        assert go_on.wait(30)
        try:
            return put_group(group)
        finally:
            seen.append(len(s.engine.swapped))

    monkeypatch.setattr(s.store, "put_group", slow_put)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: len(s.actor.holdings.submitting) == 1, "the group is on its way")
        s.store.fence("actor-0", "off by 2.2")
        await until(lambda: s.actor.is_paused, "it starts over")
        go_on.set()
        await until(lambda: len(s.engine.swapped) == 2, "its weights anew")
    assert seen == [1] and s.groups() == []


@pytest.mark.heavy
@pytest.mark.parametrize("tickets_per_group", [1, 2])
async def test_store_that_takes_no_groups_stops_new_ones_and_not_what_runs(tmp_path, monkeypatch, tickets_per_group):
    limits = dataclasses.replace(LIMITS, max_unstored_groups=2 // tickets_per_group)
    s = make_setup(tmp_path, auto=True, width=1, limits=limits, tickets_per_group=tickets_per_group)
    put_group, go_on = s.store.put_group, threading.Event()
    monkeypatch.setattr(s.store, "put_group", lambda group: go_on.wait(30) and put_group(group))
    s.publish(0)
    s.put(*range(20))
    async with s.serving():
        await until(lambda: len(s.actor.holdings.submitting) == 2, "as many as may wait")
        for _ in range(5):
            await asyncio.to_thread(s.store.heartbeats)
        assert s.actor.num_groups <= 3  # the one that had begun before the second was sampled
        go_on.set()
        await until(lambda: len(s.groups()) == 20, "all of them")


@contextlib.asynccontextmanager
async def one_is_put_and_one_waits(tmp_path, monkeypatch, limits=LIMITS):
    """An actor with two groups sampled, of a store that takes its time over the one that it is given."""
    monkeypatch.setattr("actor.leases.PUTS_AT_ONCE", 1)
    s = make_setup(tmp_path, auto=True, limits=limits)
    put_group, go_on = s.store.put_group, threading.Event()
    monkeypatch.setattr(s.store, "put_group", lambda group: go_on.wait(30) and put_group(group))
    s.publish(0)
    s.put(0, 1)
    try:
        async with s.serving() as task:
            await until(lambda: s.actor.num_groups == 2 and not s.actor.held, "both are sampled")
            assert len(s.actor.holdings.submitting) == 1
            yield s, task, go_on
    finally:
        go_on.set()


async def test_lease_of_a_group_that_waits_for_its_turn_to_be_put_is_renewed(tmp_path, monkeypatch):
    limits = dataclasses.replace(LIMITS, lease_s=0.3)
    async with one_is_put_and_one_waits(tmp_path, monkeypatch, limits) as (s, _, go_on):
        renewed, renew = set(), s.store.renew

        def spy(actor, ids, *, lease_s):
            renewed.update(ids)
            return renew(actor, ids, lease_s=lease_s)

        monkeypatch.setattr(s.store, "renew", spy)
        await until(lambda: renewed == {"t0", "t1"}, "both are renewed")
        go_on.set()
        await until(lambda: len(s.groups()) == 2, "both groups")


async def test_actor_that_ends_gives_back_a_group_that_waits_and_not_the_one_being_put(tmp_path, monkeypatch):
    async with one_is_put_and_one_waits(tmp_path, monkeypatch) as (s, task, _):
        task.cancel()
        await asyncio.wait({task})
        assert s.store.counts()["open"] == s.store.counts()["claimed"] == 1


async def test_group_that_waits_when_all_groups_are_ended_is_for_others_at_once(tmp_path, monkeypatch):
    async with one_is_put_and_one_waits(tmp_path, monkeypatch) as (s, _, _):
        s.actor.shut_down()  # so that it doesn't claim it itself
        assert await s.actor.abort_all() == []
        assert s.store.counts()["open"] == s.store.counts()["claimed"] == 1


async def test_store_that_is_lost_ends_the_actor_without_another_call(tmp_path, monkeypatch):
    s = make_setup(tmp_path)
    s.publish(0)

    def lost(*_, **__):
        raise StoreLostError("away for 600 s")

    async with s.serving() as task:
        await s.served(Version(incarnation=0, step=0))
        monkeypatch.setattr(s.store, "release", lambda *_: pytest.fail("asked again"))
        monkeypatch.setattr(s.store, "claim", lost)
        s.put(0)
        error = await ended(task)
    assert isinstance(error, StoreLostError)


async def test_dead_engine_ends_the_actor_and_its_tickets_are_free(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    s.put(0)
    async with s.serving() as task:
        await s.runs("t0.0", "t0.1")
        s.engine.die()
        assert isinstance(await ended(task), EngineDeadError)
    assert s.store.counts()["open"] == 1


async def test_group_sent_twice_is_taken_once(tmp_path):
    s = make_setup(tmp_path)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        assert s.store.put_group(make_group(ticket(0), actor="other"))
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: not s.actor.num_groups, "the group ended")
        assert s.actor.serving.tally.num_emitted == 0
    assert [g.actor for g in s.groups()] == ["other"]
