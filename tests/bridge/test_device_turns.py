"""Turns on shared devices, with real locks and a real process that dies."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bridge.device_turns import EngineTurn, TrainerTurn
from tests.integration.support.processes import wait_until


@pytest.fixture
def engines(tmp_path: Path):
    made = [EngineTurn(tmp_path), EngineTurn(tmp_path)]
    yield made
    for turn in made:
        turn.close()


@pytest.fixture
def learner(tmp_path: Path):
    turn = TrainerTurn(tmp_path)
    yield turn
    turn.close()


def test_learner_has_the_devices_alone_and_engines_share_them(engines, learner):
    assert all(engine.try_take() for engine in engines)
    taking = threading.Thread(target=learner.take, args=(lambda: None,))
    taking.start()
    wait_until(engines[0].is_wanted, "engines see that the devices are wanted")
    engines[0].give_back()
    assert not learner.is_held and not engines[0].try_take()
    engines[1].give_back()
    taking.join()
    assert learner.is_held and not any(engine.try_take() for engine in engines)
    learner.give_back()
    assert not learner.is_held and not engines[0].is_wanted() and all(engine.try_take() for engine in engines)


async def test_engine_that_waits_has_its_turn_when_the_learner_returns_the_devices(engines, learner):
    learner.take(lambda: None)
    waiting = asyncio.create_task(engines[0].take())
    await asyncio.sleep(0)
    assert not waiting.done()
    learner.give_back()
    await waiting


def test_learner_that_is_stopped_while_it_waits_wants_nothing_any_more(engines, learner):
    assert engines[0].try_take()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.take(stop)
    assert not engines[0].is_wanted() and not learner.is_held


@pytest.mark.parametrize("side", ["TrainerTurn", "EngineTurn"])
def test_turn_of_a_process_that_is_killed_is_over(tmp_path, engines, learner, side):
    call = "take(lambda: None)" if side == "TrainerTurn" else "try_take()"
    code = f"""
import pathlib, time
from bridge.device_turns import {side}
turn = {side}(pathlib.Path({str(tmp_path)!r}))
turn.{call}
print("has it", flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        assert side == "EngineTurn" or not engines[0].try_take()
        process.send_signal(signal.SIGKILL)
    learner.take(lambda: None)
    learner.give_back()
    assert engines[0].try_take()
