"""An engine that gives its devices up while others train on them, and wakes with the newest weights."""

import asyncio
import dataclasses

import pytest

from actor.engine_protocol import EngineDeadError
from bridge.device_turns import HELPER, EngineTurn, TrainerTurn
from tests.actor.fakes import until
from tests.actor.loop_setup import LIMITS, ended, make_setup


async def test_engine_sleeps_while_the_learner_has_the_devices_and_wakes_with_its_weights(tmp_path):
    s = make_setup(tmp_path)
    s.actor.turn, learner = EngineTurn(tmp_path), TrainerTurn(tmp_path)
    assert s.actor.turn.try_take()
    s.publish(0)
    s.put(0)
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        s.engine.step("t0.0", 3)
        await asyncio.to_thread(learner.take, lambda: None)
        assert s.engine.is_asleep and s.running() == []
        await until(lambda: s.store.counts()["open"] == 1, "its ticket is handed over")
        version = s.publish(1)
        s.put(1)
        learner.give_back()
        await s.served(version)
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        assert not s.engine.is_asleep
        assert [v.step for v in s.engine.running["t0.0"].versions] == [0, 0, 0]  # it goes on
    learner.close()


async def test_engine_that_wakes_takes_the_announced_weights_again_although_it_served_them(tmp_path):
    s = make_setup(tmp_path)
    s.actor.turn, learner = EngineTurn(tmp_path), TrainerTurn(tmp_path)
    assert s.actor.turn.try_take()
    version = s.publish(0)
    async with s.serving():
        await s.served(version)
        await asyncio.to_thread(learner.take, lambda: None)
        learner.give_back()
        await until(lambda: s.engine.swapped == [version, version], "its weights were swapped in again")


async def test_engine_without_weights_stands_down_again_for_a_learner_that_died_before_it_announced_any(tmp_path):
    s = make_setup(tmp_path)
    s.actor.turn, first, second = EngineTurn(tmp_path), TrainerTurn(tmp_path), TrainerTurn(tmp_path)
    assert s.actor.turn.try_take()
    async with s.serving():
        await asyncio.to_thread(first.take, lambda: None)
        first.close()
        await until(lambda: not s.engine.is_asleep, "the engine has the devices")
        await asyncio.to_thread(second.take, lambda: None)
        assert s.engine.is_asleep
        version = s.publish(0)
        second.give_back()
        await s.served(version)
    second.close()


@pytest.mark.parametrize("change", ["sleep", "wake_up"])
async def test_engine_that_hangs_while_it_changes_hands_ends_the_actor(tmp_path, monkeypatch, change):
    s = make_setup(tmp_path)
    s.actor.turn, learner = EngineTurn(tmp_path), TrainerTurn(tmp_path)
    assert s.actor.turn.try_take()
    monkeypatch.setattr(s.engine, change, asyncio.Event().wait)
    version = s.publish(0)
    async with s.serving() as serving:
        await s.served(version)
        s.actor.limits = dataclasses.replace(LIMITS, swap_timeout_s=0.05)
        taking = asyncio.create_task(asyncio.to_thread(learner.take, lambda: None))
        if change == "wake_up":
            await taking
            learner.give_back()
        assert isinstance(await ended(serving), EngineDeadError)
        s.actor.turn.give_back()  # as the death of its process does
        await taking
    learner.close()


async def test_engine_that_sleeps_serves_no_weights_and_says_how_long_it_took_to_wake(tmp_path):
    s = make_setup(tmp_path)
    s.actor.turn, trainer = EngineTurn(tmp_path, HELPER), TrainerTurn(tmp_path, HELPER)
    assert s.actor.turn.try_take()
    version = s.publish(0)
    async with s.serving():
        await s.served(version)
        await asyncio.to_thread(trainer.take, lambda: None)
        await until(lambda: [b.version for b in s.store.heartbeats()] == [None], "its heartbeat says so")
        assert s.store.engine_capacity(anew=True) == {} and s.report().wake_s is None
        trainer.give_back()
        await until(lambda: [b.version for b in s.store.heartbeats()] == [version], "it serves again")
        assert s.report().wake_s is not None and s.report().kv_tokens == s.engine.size.kv_tokens
    trainer.close()


async def test_ticket_that_is_claimed_while_the_engine_falls_asleep_goes_back(tmp_path, monkeypatch):
    s = make_setup(tmp_path)
    s.actor.turn, trainer = EngineTurn(tmp_path), TrainerTurn(tmp_path)
    assert s.actor.turn.try_take()
    version = s.publish(0)
    claim, is_asking, may_claim, claimed = s.actor.holdings.claim, asyncio.Event(), asyncio.Event(), []

    async def late(**fields):
        is_asking.set()
        await may_claim.wait()
        claimed.extend(tickets := await claim(**fields))
        return tickets

    async with s.serving():
        await s.served(version)
        monkeypatch.setattr(s.actor.holdings, "claim", late)
        s.put(0)
        s.actor.on_store_event(["tickets"])
        await is_asking.wait()
        await asyncio.to_thread(trainer.take, lambda: None)
        assert s.engine.is_asleep
        may_claim.set()
        await until(lambda: len(claimed) == 1, "it has the ticket")
        await until(lambda: s.store.counts()["open"] == 1 and not s.actor.held, "another actor may have it")
    trainer.close()


async def test_engine_serves_on_if_its_devices_are_not_wanted_any_more_before_it_sleeps(tmp_path):
    """An evaluation runs to its end first; the trainer does not wait that long."""
    s = make_setup(tmp_path)
    s.actor.turn, trainer = EngineTurn(tmp_path), TrainerTurn(tmp_path)
    assert s.actor.turn.try_take()

    class GivenUpError(Exception):
        pass

    def give_up():
        if s.actor.is_paused:
            raise GivenUpError

    s.publish(0)
    s.put(0, kind="eval")
    async with s.serving():
        await s.runs("t0.0", "t0.1")
        with pytest.raises(GivenUpError):
            await asyncio.to_thread(trainer.take, give_up)
        await until(lambda: not s.actor.is_paused, "it takes tickets again")
        s.put(1)
        await s.runs("t0.0", "t0.1", "t1.0", "t1.1")
        assert not s.engine.is_asleep and s.engine.swapped == [s.engine.version]
    trainer.close()
