"""The loop and its weights: the first ones, in-flight updates, abandoned ones, snapshots that can't be used."""

import asyncio
import dataclasses

import pytest

from actor.engine_protocol import EngineDeadError
from bridge.rollout_types import Version
from tests.actor.fakes import until
from tests.actor.loop_setup import LIMITS, ended, make_setup


@pytest.mark.heavy
async def test_tickets_wait_for_the_first_weights(tmp_path):
    s = make_setup(tmp_path, auto=True)
    s.put(0, 1)
    async with s.serving():
        await until(lambda: bool(s.store.heartbeats()), "a heartbeat")
        assert s.store.heartbeats()[0].version is None
        assert s.store.counts()["open"] == 2  # not even claimed
        s.publish(3)
        await until(lambda: len(s.groups()) == 2, "both groups")


async def test_ticket_for_newer_weights_waits_for_them(tmp_path):
    s = make_setup(tmp_path, auto=True)
    s.publish(0)
    s.put(0, min_version=Version(incarnation=0, step=1))
    s.put(1)
    async with s.serving():
        await until(lambda: [g.order for g in s.groups()] == [1], "the servable one")
        s.publish(1)
        await until(lambda: len(s.groups()) == 2, "the other one")
    assert {g.order: g.min_step for g in s.groups()} == {0: 1, 1: 0}


async def test_update_in_flight_reaches_the_group(tmp_path):
    s = make_setup(tmp_path)
    await asyncio.to_thread(s.publish, 0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 2)
        await s.served(s.publish(1))
        s.engine.step("t0.0", 1)
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await until(lambda: bool(s.groups()), "the group")
    (group,) = s.groups()
    assert group.rollouts[0].token_versions.tolist() == [0, 0, 1]
    assert (group.min_step, group.max_step) == (0, 1)
    assert s.engine.aborted == []


async def test_abandoned_future_is_sampled_again(tmp_path):
    """Served 0:5; the learner is back at step 3 under incarnation 1: nothing of 0:5 may stay."""
    s = make_setup(tmp_path)
    s.publish(5)
    s.put(0, 1)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        s.engine.step("t0.0", 1)
        s.engine.finish("t0.1")
        await s.runs("t0.0", "t1.0", "t1.1")
        await s.served(s.publish(3, incarnation=1))
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        assert sorted(s.engine.aborted) == ["t0.0", "t1.0", "t1.1"]
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: len(s.groups()) == 2, "both groups")
    for group in s.groups():
        assert (group.incarnation, group.min_step, group.max_step) == (1, 3, 3)
    assert s.store.counts()["reissued"] == 0


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("base_steps", "newest"),
    [
        ({0: 0, 1: 3}, (1, 5)),  # it trained to the very step served, other weights
        ({0: 0, 1: 3}, (1, 9)),
        ({0: 0, 1: 3, 2: 6}, (2, 6)),  # the learner between them went back
        ({0: 0, 1: 4, 2: 4, 3: 4}, (3, 4)),
        ({}, (1, 5)),  # not told: an older learner
    ],
)
async def test_weights_that_a_learner_went_back_behind_are_abandoned_whatever_step_it_is_at_now(
    tmp_path, base_steps, newest
):
    incarnation, step = newest
    s = make_setup(tmp_path)
    s.publish(5)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 1)
        s.restart_learner(base_steps)
        await s.served(s.publish(step, incarnation=incarnation))
        await s.runs("t0.0", "t0.1")
        assert sorted(s.engine.aborted) == ["t0.0", "t0.1"]
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: bool(s.groups()), "the group")
    (group,) = s.groups()
    assert (group.incarnation, group.older_versions, group.min_step) == (incarnation, (), step)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("base_steps", "newest"),
    [({0: 0, 1: 5}, (1, 5)), ({0: 0, 1: 5}, (1, 7)), ({0: 0, 1: 6, 2: 5, 3: 8}, (3, 8))],
)
async def test_higher_incarnation_that_lost_nothing_aborts_nothing(tmp_path, base_steps, newest):
    incarnation, step = newest
    s = make_setup(tmp_path)
    s.publish(5)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 1)
        s.restart_learner(base_steps)
        await s.served(s.publish(step, incarnation=incarnation))
        s.engine.step("t0.0", 1)
        s.engine.finish("t0.0")
        s.engine.finish("t0.1")
        await until(lambda: bool(s.groups()), "the group")
    assert s.engine.aborted == []
    (group,) = s.groups()
    assert (group.incarnation, group.max_step) == (incarnation, step)
    assert group.older_versions == (Version(incarnation=0, step=5),)


@pytest.mark.heavy
async def test_drained_group_has_one_version_and_what_follows_has_the_newest(tmp_path):
    s = make_setup(tmp_path, width=2, drain_before_swap=True)
    s.publish(0)
    s.put(0, 1, 2)
    async with s.serving():
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        s.engine.step("t0.0", 3)
        s.publish(1)
        await until(lambda: "prefetch_s" in s.actor.weights.timings and s.actor.is_paused, "it drains")
        for id_ in ("t0.0", "t0.1", "t1.0"):
            s.engine.finish(id_)
        await until(lambda: len(s.groups()) == 1, "the first group")
        newest = s.publish(2)  # while the last response still runs
        await until(lambda: s.events("prefetch") == ["0:0", "0:1", "0:2"], "each is fetched once")
        assert s.engine.swapped == [Version(incarnation=0, step=0)]
        assert s.running() == ["t1.1"]  # the free slot stays empty
        s.engine.finish("t1.1")
        await s.served(newest)
        assert [v.step for v in s.engine.swapped] == [0, 2]
        await s.runs("t2.0", "t2.1")
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: len(s.groups()) == 3, "all groups")
    assert {g.order: (g.min_step, g.max_step) for g in s.groups()} == {0: (0, 0), 1: (0, 0), 2: (2, 2)}
    assert s.engine.aborted == []


@pytest.mark.heavy
async def test_drain_counts_toward_no_deadline_and_an_abandoned_future_ends_it(tmp_path):
    s = make_setup(tmp_path, drain_before_swap=True)
    s.publish(5)
    s.put(0)
    async with s.serving() as task:
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 1)
        s.actor.limits = dataclasses.replace(LIMITS, swap_timeout_s=0.05)
        s.publish(6)
        await until(lambda: s.events("prefetch") == ["0:5", "0:6"], "it drains")
        before = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > before + 0.2, "longer than a swap may take")
        assert not task.done() and s.engine.version == Version(incarnation=0, step=5)
        s.actor.limits = LIMITS
        await s.served(s.publish(3, incarnation=1))
        await s.runs("t0.0", "t0.1")
        assert sorted(s.engine.aborted) == ["t0.0", "t0.1"]
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: bool(s.groups()), "the group")
    (group,) = s.groups()
    assert (group.incarnation, group.min_step, group.max_step) == (1, 3, 3)


async def test_update_that_hangs_is_found(tmp_path):
    s = make_setup(tmp_path, limits=dataclasses.replace(LIMITS, swap_timeout_s=0.2))
    s.engine.hang_swaps = True
    s.publish(0)
    async with s.serving() as task:
        error = await ended(task)
    assert isinstance(error, EngineDeadError) and "longer than 0.2 s" in str(error)


@pytest.mark.heavy
async def test_broken_snapshot_gives_waiting_tickets_back_and_serves_on(tmp_path):
    s = make_setup(tmp_path)
    v0 = s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        v1 = Version(incarnation=0, step=1)
        s.engine.refuse = {v1}
        s.put(1, min_version=v1)
        await until(lambda: "t1" in s.actor.held, "it is claimed")
        s.publish(1)
        await until(lambda: s.store.counts()["open"] == 1, "it is given back")
        assert (s.engine.version, s.running()) == (v0, ["t0.0", "t0.1"])
        await s.served(s.publish(2))
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")


async def test_ticket_with_an_ended_sample_that_is_stale_begins_anew_whole(tmp_path):
    """Its running samples alone would be restarted in vain: the group would be dropped as stale."""
    s = make_setup(tmp_path, max_lag_steps=1)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.finish("t0.1")
        await s.runs("t0.0")
        await s.served(s.publish(1))
        await s.runs("t0.0")
        await s.served(s.publish(2))
        await s.runs("t0.0", "t0.1")
        assert s.engine.aborted == ["t0.0"]
        for id_ in s.running():
            s.engine.finish(id_)
        await until(lambda: bool(s.groups()), "the group")
    (group,) = s.groups()
    assert (group.min_step, len(group.rollouts)) == (2, 2)
    assert s.store.counts()["reissued"] == 0


async def test_sample_begun_before_the_lag_bound_starts_anew_and_its_siblings_go_on(tmp_path):
    s = make_setup(tmp_path, max_lag_steps=1)
    s.publish(0)
    s.put(0)
    s.put(-5, kind="eval", num_samples=1, num_requests=1)
    async with s.serving():
        await s.runs("t-5.0", "t0.0", "t0.1")
        s.engine.step("t0.0", 3)
        await s.served(s.publish(1))
        await s.runs("t-5.0", "t0.0", "t0.1")  # within the bound
        await s.served(s.publish(2))
        await s.runs("t-5.0", "t0.0+1", "t0.1+1")  # an evaluation is of the weights it began on
        assert sorted(s.engine.aborted) == ["t0.0", "t0.1"]
        s.engine.finish("t0.1+1")
        await s.runs("t-5.0", "t0.0+1")
        await s.served(s.publish(3))
        s.engine.finish("t0.0+1")
        await until(lambda: bool(s.groups()), "the group")
    (group,) = s.groups()
    assert [set(r.token_versions.tolist()) for r in group.rollouts] == [{3}, {2}]


@pytest.mark.heavy
async def test_samples_of_younger_weights_go_on_and_one_that_started_anew_gets_stale_again(tmp_path):
    s = make_setup(tmp_path, max_lag_steps=1)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        await s.served(s.publish(1))
        s.put(1)
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        await s.served(s.publish(2))
        await s.runs("t0.0+1", "t0.1+1", "t1.0", "t1.1")
        await s.served(s.publish(3))
        await s.runs("t0.0+1", "t0.1+1", "t1.0+1", "t1.1+1")
        await s.served(s.publish(4))
        await s.runs("t0.0+2", "t0.1+2", "t1.0+1", "t1.1+1")


async def test_stale_sample_of_a_withdrawn_ticket_does_not_start_anew(tmp_path):
    s = make_setup(tmp_path, max_lag_steps=0)
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.abort_ends = asyncio.Event()
        await s.served(s.publish(1))
        await until(lambda: len(s.engine.aborted) == 2, "both are aborted")
        s.store.withdraw(["t0"])
        await until(lambda: not s.actor.held, "the ticket is gone")
        s.engine.abort_ends.set()
        await s.runs()
        await until(lambda: s.actor.num_groups == 0, "its group ended")
