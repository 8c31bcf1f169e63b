"""A real helper process beside a learner: an update's gradient equals that of one process, whatever happens to it."""

import itertools
import os
import pathlib
import signal
import time
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from bridge.device_turns import HELPER, EngineTurn
from bridge.timeline import Timeline
from configs.run_folder import RunFolder, set_up_run
from learner.gradient_helper.helper_client import MAX_LOST_IN_A_ROW, GradientHelper, State, open_helper
from tests.learner.gradient_helper.two_processes import (
    DEADLINE_S,
    NUM_GROUPS,
    check_equal,
    config_with_helper,
    learner,
    wait_for,
)
from tests.learner.streams import random_groups, stream


@pytest.mark.integration
@pytest.mark.parametrize(
    "fields",
    [{}, {"dtype": "bfloat16"}, {"rank": 3}, {"kl_coef": 0.1}],
    ids=["float32", "bfloat16", "adapters", "reference"],
)
def test_gradient_of_two_processes_is_that_of_one(tmp_path, fields):
    config = config_with_helper(tmp_path, **fields)
    updates = [stream(config, random_groups(seed, NUM_GROUPS)) for seed in range(2)]
    with learner(config, tmp_path) as one:
        for micros in updates:
            wanted = one.alone(micros)
            one.take()
            for micro in micros:
                one.helper.add(micro)
            check_equal(one.finish_update(num_own=2), wanted)
            assert 0 < one.helper.stats.num_batches < len(micros)
            one.update()
            wait_for(one.helper, State.IDLE)


def compiled_programs(run: pathlib.Path) -> set[str]:
    return {file.name for file in RunFolder(run).compiled.glob("jit_*accumulate*-cache")}


@pytest.mark.integration
def test_first_micro_batch_finds_its_program_compiled(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    config = config_with_helper(tmp_path)
    with learner(config, tmp_path) as one:
        wait_for(one.helper, State.IDLE)
        prepared = compiled_programs(one.folder)
        assert len(prepared) == 1
        one.take()
        for micro in stream(config, random_groups(0, NUM_GROUPS)):
            one.helper.add(micro)
        one.finish_update(num_own=0)
        assert one.helper.stats.num_batches and compiled_programs(one.folder) == prepared


def kill(pid: int) -> None:
    """Ends a helper; its end of the connection is closed when this returns."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def pid_of(helper: GradientHelper) -> int:
    process: Any = helper._process
    return process.process.pid


@pytest.mark.integration
def test_helper_that_is_killed_in_each_phase_costs_no_micro_batch(tmp_path, monkeypatch):
    """While it starts, while it adds, with its sum in the file; it is stopped instead of killed where it adds."""
    config = config_with_helper(tmp_path)
    monkeypatch.setattr("learner.gradient_helper.helper_client.MAX_LOST_IN_A_ROW", 10)
    answer_s = config.supervision.engine_timeout_s
    phases = (State.WAITING, State.ADDING, State.HANDING_OVER, State.HANDED_OVER, State.RELEASING)
    updates = [stream(config, random_groups(seed, NUM_GROUPS)) for seed in range(len(phases))]
    with learner(config, tmp_path) as one:
        for phase, micros in zip(phases, updates, strict=True):
            wanted = one.alone(micros)
            one.take()
            helper_pid = pid_of(one.helper)
            for micro in micros:
                one.helper.add(micro)
            if phase is not State.WAITING:
                wait_for(one.helper, State.ADDING)
            while phase in (State.HANDING_OVER, State.HANDED_OVER) and one.helper.state is not phase:
                one.helper.hand_over()
            if phase is State.ADDING:
                while not one.helper.stats.compute_s:
                    one.helper.poll()
                os.kill(helper_pid, signal.SIGSTOP)
                monkeypatch.setattr(one.helper, "_clock", itertools.count(time.monotonic(), 2 * answer_s).__next__)
                while one.helper.state is State.ADDING:
                    one.helper.poll()
                monkeypatch.setattr(one.helper, "_clock", time.monotonic)
            elif phase is not State.RELEASING:
                kill(helper_pid)
            gradient = one.finish_update(num_own=1)
            if phase is State.RELEASING:
                kill(helper_pid)
                wait_for(one.helper, State.PREPARING)
            check_equal(gradient, wanted)
            assert one.helper.is_usable and one.helper.stats.num_lost == 1
            one.update()


@pytest.mark.integration
def test_engine_and_helper_never_have_the_devices_at_once(tmp_path):
    config = config_with_helper(tmp_path)
    with learner(config, tmp_path) as one:
        engine = EngineTurn(one.folder, HELPER)
        assert engine.try_take()
        one.take()
        for micro in stream(config, random_groups(0, NUM_GROUPS)):
            one.helper.add(micro)
        deadline = time.monotonic() + DEADLINE_S
        while not engine.is_wanted():  # the helper asks for the devices, and waits
            assert time.monotonic() < deadline
            one.helper.poll()
        assert one.helper.state is State.WAITING
        engine.give_back()
        wait_for(one.helper, State.ADDING)
        assert not engine.try_take()
        one.finish_update(num_own=0)
        wait_for(one.helper, State.IDLE)
        assert engine.try_take()
        # The round ends while the helper still waits for the engine: it leaves the engine alone.
        one.update()
        one.take()
        one.helper.finish()
        wait_for(one.helper, State.IDLE)
        assert not engine.is_wanted()


@pytest.mark.integration
def test_file_that_was_damaged_is_refused(tmp_path):
    config = config_with_helper(tmp_path)
    micros = stream(config, random_groups(0, NUM_GROUPS))
    with learner(config, tmp_path) as one:
        wanted = one.alone(micros)
        one.take()
        for micro in micros:
            one.helper.add(micro)
        wait_for(one.helper, State.ADDING)
        while not one.helper.file.exists():
            # Not by `hand_over`, which would read the answer at once.
            time.sleep(0.001)
            if one.helper.state is not State.HANDING_OVER:
                one.helper.hand_over()
        data = bytearray(one.helper.file.read_bytes())
        data[len(data) // 2] ^= 1
        one.helper.file.write_bytes(data)
        check_equal(one.finish_update(num_own=0), wanted)
        assert one.helper.stats.num_lost == 1


def test_helper_is_not_used_after_too_many_losses(tmp_path):
    class Gone:
        """A process that ends at once."""

        num_devices = 1

        def start(self) -> Any:
            ours, its = Pipe()
            its.close()
            return type("Process", (), {"connection": ours, "kill": lambda self: ours.close()})()

    config = config_with_helper(tmp_path)
    (tmp_path / "run").mkdir()
    set_up_run(config)
    timeline = Timeline(tmp_path / "run" / "events", "learner")
    helper = open_helper(config, Gone(), num_own_devices=1, timeline=timeline)
    num_tries = 0
    while helper.is_usable:
        num_tries += 1
        helper.poll()
        assert helper.state is State.ENDED
    assert num_tries == MAX_LOST_IN_A_ROW
    timeline.close()
