"""How an actor's process ends when it is told to: signals to this very process, a made-up engine."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from actor.engine_protocol import EngineDeadError
from actor.weight_updates import BACKGROUND_TASKS
from bridge.rollout_types import TicketKind, Version
from launch.startup.actor_lifecycle import serve_until_signalled
from tests.actor.fakes import until
from tests.actor.loop_setup import make_setup


@contextlib.asynccontextmanager
async def told(s, *, shutdown_grace_s: float, kind: TicketKind = "train"):
    """The actor, with two groups of two requests in progress, and a signal to it."""
    s.publish(0)
    s.put(0, 1, *([] if kind == "eval" else [2]), kind=kind)  # evaluations take no place: a third would start too
    task = asyncio.create_task(serve_until_signalled(s.actor, BACKGROUND_TASKS, shutdown_grace_s=shutdown_grace_s))
    try:
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        yield task
    finally:
        await s.rewards.close()
        assert task.done()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGHUP has its default handler, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_sigterm_or_closed_terminal_hands_over_what_runs_and_gives_back_the_rest(tmp_path, number):
    s = make_setup(tmp_path)
    async with told(s, shutdown_grace_s=1000.0) as task:
        os.kill(os.getpid(), number)
        await task
    assert s.running() == [] and s.groups() == [] and s.store.counts()["open"] == 3


async def test_sigterm_lets_evaluations_finish(tmp_path):
    s = make_setup(tmp_path)
    async with told(s, shutdown_grace_s=1000.0, kind="eval") as task:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: s.actor.is_shutting_down, "it leaves")
        for id_ in s.running():
            s.engine.finish(id_)
        await task
    assert len(s.groups("eval")) == 2 and s.engine.aborted == []


async def test_sigterm_gives_back_what_is_not_finished_in_time(tmp_path):
    s = make_setup(tmp_path)
    async with told(s, shutdown_grace_s=0.2, kind="eval") as task:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: s.actor.is_shutting_down, "it leaves")
        await task
    assert s.groups("eval") == [] and len(s.engine.aborted) == 4 and s.store.counts()["open"] == 2


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_ends_at_once(tmp_path, second):
    s = make_setup(tmp_path)
    async with told(s, shutdown_grace_s=1000.0, kind="eval") as task:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: s.actor.is_shutting_down, "it leaves")
        os.kill(os.getpid(), second)
        await task
    assert len(s.engine.aborted) == 4 and s.store.counts()["open"] == 2


async def test_sigint_ends_at_once_since_the_engine_gets_it_too(tmp_path):
    s = make_setup(tmp_path)
    async with told(s, shutdown_grace_s=1000.0, kind="eval") as task:
        os.kill(os.getpid(), signal.SIGINT)
        await task
    assert len(s.engine.aborted) == 4 and s.store.counts()["open"] == 2


@pytest.mark.heavy
async def test_actor_that_fails_before_it_is_told_says_why(tmp_path):
    s = make_setup(tmp_path)
    async with told(s, shutdown_grace_s=1000.0) as task:
        s.engine.die()
        with pytest.raises(EngineDeadError):
            await task
    assert s.engine.version == Version(incarnation=0, step=0)


@pytest.mark.heavy
async def test_store_that_is_away_when_the_actor_is_told_keeps_it_no_longer_than_a_bound(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr("launch.startup.actor_lifecycle.GIVE_BACK_S", 0.1)
    monkeypatch.setattr("launch.startup.actor_lifecycle.end_now", ended.append)
    s = make_setup(tmp_path)
    back = asyncio.Event()
    loop = asyncio.get_running_loop()

    def away(*_):
        asyncio.run_coroutine_threadsafe(back.wait(), loop).result(60)

    monkeypatch.setattr(s.store, "release", away)
    s.publish(0)
    s.put(0)
    task = asyncio.create_task(serve_until_signalled(s.actor, BACKGROUND_TASKS, shutdown_grace_s=0.0))
    await s.runs("t0.0", "t0.1")
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert len(ended) == 1
    back.set()
    await s.rewards.close()
