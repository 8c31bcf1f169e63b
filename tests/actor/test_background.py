"""Signs of life: what a heartbeat says, and an engine that hangs."""

import asyncio
import collections
import contextlib
import dataclasses
import threading
from typing import cast

import pytest

from actor import background
from actor.background import RunFinished, watch_run_end
from actor.engine_protocol import EngineDeadError
from actor.environments.episode import Episodes
from bridge.heartbeat_types import DecodeSpeed, Heartbeat
from bridge.rollout_types import Task, Version
from tests.actor.fakes import until
from tests.actor.loop_setup import LIMITS, ended, make_setup
from tests.bridge.factories import make_report


@contextlib.asynccontextmanager
async def hung_update(s):
    """The actor's task, in an update whose call has no answer."""
    s.publish(0)
    async with s.serving() as task:
        await s.served(Version(incarnation=0, step=0))
        s.engine.hang_swaps = True
        s.publish(1)
        await until(lambda: s.actor.weights.is_swapping, "the update has begun")
        yield task


async def test_heartbeat_carries_the_version_and_the_updates_timings(tmp_path):
    s = make_setup(tmp_path, auto=True)
    v = s.publish(4)
    s.put(0)
    s.engine.decode_speeds = (DecodeSpeed(), DecodeSpeed(num_steps=3, num_tokens=7, seconds=0.5))
    async with s.serving():
        await until(lambda: bool(s.groups()), "the group")
        await until(lambda: s.report().num_groups == 1, "it is told")
    assert s.report().decode_speeds == s.engine.decode_speeds
    (beat,) = s.store.heartbeats()
    assert (beat.process, beat.role, beat.version) == ("actor-0", "actor", v)
    assert (s.report().pause_s, s.report().load_s) == (0.02, 0.01) and (s.report().prefetch_s or 0) > 0


async def test_heartbeat_tells_the_episodes_that_may_be_in_flight(tmp_path):
    s = make_setup(tmp_path)
    s.actor.admission.max_in_flight = 32
    await background.send_heartbeat(s.actor)
    assert s.report().max_sequences == 32 and s.actor.admission.max_sequences == 8
    await s.rewards.close()


async def test_tickets_are_shared_among_all_that_serve_without_reading_their_heartbeats(tmp_path):
    def beat(s, name, version):
        report = make_report(max_sequences=64)
        s.store.heartbeat(Heartbeat(process=name, role="actor", pid=1, time_s=0.0, version=version, report=report))

    s = make_setup(tmp_path, auto=True)
    s.store.heartbeats = lambda: pytest.fail("as many rows as there are engines")
    for i in range(3):
        beat(s, f"far-{i}", Version(incarnation=0, step=0))
    beat(s, "starting", None)
    async with s.serving():
        await until(lambda: s.actor.admission.num_engines == 4, "three others serve")
        assert not s.actor.is_counted  # it has no weights, and counts itself
        v = s.publish(0)
        await s.served(v)
        await until(lambda: s.actor.is_counted, "it is counted too")
        assert s.actor.admission.num_engines == 4 and s.store.engine_capacity() == {64: 3, 8: 1}


async def test_actor_whose_signs_come_too_late_still_counts_itself(tmp_path):
    s = make_setup(tmp_path, auto=True)
    s.store.heartbeat = lambda beat: None
    v = s.publish(0)
    async with s.serving():
        await s.served(v)
        await until(lambda: s.actor.is_counted, "it has said so")
        assert s.store.engine_capacity(anew=True) == {} and s.actor.admission.num_engines == 1


async def test_sign_that_was_under_way_when_the_weights_came_is_not_believed_after_them(tmp_path):
    s = make_setup(tmp_path)
    began, go_on = asyncio.Event(), threading.Event()
    loop, heartbeat = asyncio.get_running_loop(), s.store.heartbeat

    def slow(beat):
        if beat.version is None:
            loop.call_soon_threadsafe(began.set)
            go_on.wait()
        heartbeat(beat)

    s.store.heartbeat = slow
    first = asyncio.create_task(background.send_heartbeat(s.actor))
    await began.wait()
    s.engine.version = Version(incarnation=0, step=0)
    second = asyncio.create_task(background.send_heartbeat(s.actor))
    await asyncio.sleep(0)
    await until(lambda: second.done() or s.actor.heartbeat_lock.locked(), "it waits for its turn")
    go_on.set()
    await asyncio.gather(first, second)
    assert s.store.engine_capacity(anew=True) == {8: 1} and s.actor.is_counted
    assert s.actor.admission.num_engines == 1
    await s.rewards.close()


@pytest.mark.heavy
async def test_engine_that_stands_still_for_an_update_is_not_found_by_its_tokens(tmp_path):
    s = make_setup(tmp_path, limits=dataclasses.replace(LIMITS, stall_s=0.1, swap_timeout_s=0.8))
    async with hung_update(s) as task:
        s.put(0)
        error = await ended(task)
    # By the update's own bound, though no token was sampled for longer than a stall.
    assert isinstance(error, EngineDeadError) and "a weight update took longer than 0.8 s" in str(error)
    assert not s.actor.weights.is_swapping


async def test_engine_that_dies_in_an_update_is_found_before_the_updates_bound(tmp_path):
    s = make_setup(tmp_path, limits=dataclasses.replace(LIMITS, stall_s=0.4, swap_timeout_s=20))
    async with hung_update(s) as task:
        s.engine.is_dead = True  # nothing is raised in the update's call
        error = await ended(task)
    assert isinstance(error, EngineDeadError) and "the engine's processes have exited" in str(error)
    assert not s.actor.weights.is_swapping


async def test_engine_that_nobody_asks_while_an_episode_is_in_its_environment_is_not_hung(tmp_path, monkeypatch):
    class Slow:
        num_failures = 0
        failures: collections.Counter[str] = collections.Counter()

        async def play(self, episode):
            await asyncio.Event().wait()  # its environment takes its time

    class Hours:
        num_looks = 0

        def look(self) -> float:
            Hours.num_looks += 1
            return 3600.0 * Hours.num_looks

    episodes = cast(Episodes, cast(object, Slow()))
    s = make_setup(tmp_path, limits=dataclasses.replace(LIMITS, stall_s=0.04), episodes=episodes)
    s.publish(0)
    monkeypatch.setattr(background, "WatchedTime", Hours)
    async with s.serving() as task:
        await s.served(Version(incarnation=0, step=0))
        s.put(0, task=Task(rewards=(), answer="", metadata="{}", environment="slow"))
        await until(lambda: s.actor.admission.num_sequences == 2, "two episodes are played")
        looks = Hours.num_looks
        await until(lambda: task.done() or Hours.num_looks > looks + 3, "the engine was looked at")
        assert not task.done()


@pytest.mark.heavy
async def test_engine_that_samples_nothing_is_found(tmp_path):
    s = make_setup(tmp_path, limits=dataclasses.replace(LIMITS, stall_s=0.5))
    s.publish(0)
    async with s.serving() as task:
        await s.served(Version(incarnation=0, step=0))
        await asyncio.wait({task}, timeout=1.0)
        assert not task.done()  # idle is not hung
        s.put(0)
        error = await ended(task)
    assert isinstance(error, EngineDeadError) and "no token for 0.5 s with 2 requests" in str(error)


@pytest.mark.heavy
async def test_actor_gives_back_what_it_has_and_ends_when_its_run_is_finished(tmp_path):
    s = make_setup(tmp_path)
    s.store.acquire_leadership("here", lease_s=30)
    s.publish(0)
    s.put(0, 1)
    async with s.serving(watch_run_end) as serving:
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        s.store.finish(0)
        error = await ended(serving)
    assert isinstance(error, RunFinished) and "0:0" in str(error)
    assert len(s.engine.aborted) == 4 and s.store.counts()["open"] == 2


async def test_actor_whose_learner_only_left_serves_on(tmp_path):
    s = make_setup(tmp_path, auto=True)
    s.store.acquire_leadership("here", lease_s=30)
    s.publish(0)
    async with s.serving(watch_run_end) as serving:
        s.store.release_leadership()
        s.put(0)
        await until(lambda: len(s.groups()) == 1, "it serves")
        assert not serving.done()
