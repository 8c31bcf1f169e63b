"""Sharing of an update's micro-batches between the learner's loop and a helper whose process is made up.

A micro-batch's gradient is its number as a power of ten here, so the sum says how often each is in it.
"""

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.rollout_types import Version
from bridge.timeline import Timeline
from learner.commands import Accumulate, Merge, WriteExactParams
from learner.gradient_helper.gradient_ledger import OWN
from learner.gradient_helper.helper_client import GradientHelper, State
from learner.gradient_helper.messages import (
    AddBatch,
    BatchAdded,
    DevicesReleased,
    DevicesTaken,
    HandedOver,
    HandOver,
    HelperReady,
    ParamsRead,
    ReleaseDevices,
    TakeDevices,
    decode_request,
    encode,
)
from learner.run import Run
from learner.train import share
from learner.update.tree_file import read_tree, write_tree

NUM_MICROS = 6
EACH_ONCE = 111111.0
VERSION = Version(incarnation=0, step=0)


class FakeProcess:
    """A helper that answers at once, but ends at a kind of request; it is its own connection."""

    def __init__(self, ends_at: type | None, *, has_engines: bool, says: float = 0.0) -> None:
        self._ends_at, self._has_engines, self._says = ends_at, has_engines, says
        self._total, self._numbers = 0.0, list[int]()
        self._replies: list[Any] = [HelperReady()]
        self._has_ended = False
        self.requests: list[str] = []

    @property
    def connection(self) -> Any:
        return self

    def kill(self) -> None:
        self._has_ended = True

    def poll(self) -> bool:
        return bool(self._replies) or self._has_ended

    def recv_bytes(self) -> bytes:
        if not self._replies:
            raise EOFError
        return encode(self._replies.pop(0))

    def send_bytes(self, data: bytes) -> None:
        request = decode_request(data)
        self.requests.append(type(request).__name__)
        if self._has_ended or type(request) is self._ends_at:
            self._has_ended = True
            raise BrokenPipeError
        match request:
            case TakeDevices():
                self._total, self._numbers = 0.0, []
                if not self._has_engines:
                    self._replies += [DevicesTaken(wait_s=0.0), ParamsRead(read_s=0.0)]
            case AddBatch():
                self._total += float(read_tree(Path(request.file), np.float32(0)))
                self._numbers.append(request.number)
                self._replies.append(BatchAdded(number=request.number, compute_s=1.0))
            case HandOver():
                digest = write_tree(Path(request.file), np.float32(self._total))
                divisor = self._total + self._says
                self._replies.append(HandedOver(numbers=tuple(self._numbers), denominator=divisor, digest=digest))
            case ReleaseDevices():
                self._replies.append(DevicesReleased())


class FakeBatch(np.ndarray):
    """A number that is its own divisor."""

    @property
    def denominator(self) -> float:
        return float(self)


def micro(number: int) -> Any:
    batch = np.asarray(np.float32(10**number)).view(FakeBatch)
    return SimpleNamespace(batch=batch, ticket_ids=(f"t{number}",), ends_update=number == NUM_MICROS - 1)


class Learner:
    """A run's parts as `share` uses them; `drops` is a micro-batch whose gradient is lost."""

    def __init__(self, tmp_path: Path, process: FakeProcess, *, is_colocated=False, drops: int | None = None) -> None:
        self.total, self._drops = 0.0, drops
        self.has_taken_devices = not is_colocated
        self.trained: list[str] = []
        timeline = Timeline(tmp_path / "events", "learner")
        processes = itertools.chain([process], iter(lambda: FakeProcess(None, has_engines=True), None))
        self.helper = GradientHelper(
            lambda: next(processes), tmp_path / "files", prepare_s=60.0, answer_s=60.0, num_ahead=2, timeline=timeline
        )
        checks = SimpleNamespace(check=lambda: None, report_progress=lambda: None)
        run: Any = SimpleNamespace(
            helper=self.helper,
            step=0,
            do=self._do,
            trainer=SimpleNamespace(
                state=None, steps=SimpleNamespace(num_compilations=0, denominator=lambda state: self.total)
            ),
            timeline=timeline,
            heartbeat=checks,
            publisher=SimpleNamespace(announced_version=VERSION),
            evaluations=SimpleNamespace(wait=lambda: None),
            probe=SimpleNamespace(await_groups=lambda: None),
            stream=SimpleNamespace(
                poll=lambda: self.run.look_at_helper(),
                aside=lambda what: timeline.measure(what),
                planner=SimpleNamespace(num_arrived_in_round=0, round_is_long=False),
                clock=None,
            ),
            scale_down=SimpleNamespace(
                is_due=lambda *_, **__: True, is_due_at_end=lambda *_, **__: True, released_at=0.0, num_helping=1
            ),
            take_devices=self._take_devices,
        )
        run.look_at_helper = functools.partial(Run.look_at_helper, run)
        run.has_devices = self.has_taken_devices
        self.run = run
        self._metrics: Any = SimpleNamespace(
            add_batch=lambda micro, *_: self.trained.extend(micro.ticket_ids),
            add_helped=lambda micros, _: self.trained.extend(id_ for m in micros for id_ in m.ticket_ids),
            computed=lambda *_: None,
        )

    def train(self) -> None:
        """One update; the helper's process is ready before."""
        while self.helper.state is State.ENDED or self.helper.state is State.PREPARING:
            self.helper.poll()
        for number in range(NUM_MICROS):
            share(self.run, self.helper, micro(number), self._metrics)

    def _take_devices(self, on_wait) -> None:
        self.run.has_devices = True

    def _do(self, command) -> None:
        assert self.run.has_devices or isinstance(command, WriteExactParams)
        match command:
            case Accumulate(micro):
                made_up: Any = micro.batch
                self.total += 0.0 if micro.ticket_ids == (f"t{self._drops}",) else float(made_up)
            case Merge(file):
                self.total += float(read_tree(Path(file), np.float32(0)))
            case _:
                pass


@pytest.mark.parametrize("is_colocated", [False, True])
@pytest.mark.parametrize("ends_at", [None, TakeDevices, AddBatch, HandOver, ReleaseDevices])
def test_every_micro_batch_is_in_the_update_once_wherever_the_helper_dies(tmp_path, ends_at, is_colocated):
    process = FakeProcess(ends_at, has_engines=False)
    learner = Learner(tmp_path, process, is_colocated=is_colocated)
    learner.train()
    assert learner.total == EACH_ONCE and sorted(learner.trained) == [f"t{n}" for n in range(NUM_MICROS)]
    if ends_at is None and is_colocated:  # the learner has no devices before the last one
        assert process.requests.count("AddBatch") >= NUM_MICROS - 1
    assert learner.helper.end_update().num_lost == (ends_at not in (None, ReleaseDevices))
    learner.helper.close()


def test_sum_with_another_divisor_than_its_micro_batches_is_computed_again(tmp_path):
    learner = Learner(tmp_path, FakeProcess(None, has_engines=False, says=1.0), is_colocated=True)
    learner.train()
    assert learner.total == EACH_ONCE and learner.helper.stats.num_lost == 1
    learner.helper.close()


def test_helper_whose_engines_never_stand_down_is_let_go_and_not_lost(tmp_path):
    process = FakeProcess(None, has_engines=True)
    learner = Learner(tmp_path, process)
    learner.train()
    assert learner.total == EACH_ONCE and learner.helper.state is State.RELEASING
    while learner.helper.state is State.RELEASING:
        learner.helper.poll()
    assert learner.helper.state is State.IDLE and learner.helper.stats.num_lost == 0
    assert process.requests == ["TakeDevices", "ReleaseDevices"]
    learner.helper.close()


def test_gradient_that_the_learner_lost_stops_the_run(tmp_path):
    learner = Learner(tmp_path, FakeProcess(None, has_engines=True), drops=3)
    with pytest.raises(RuntimeError, match=f"accumulated divisor is 110111.0, expected {EACH_ONCE}"):
        learner.train()
    learner.helper.close()


def test_engines_that_take_long_are_not_a_loss(tmp_path):
    """After the timeout the helper asks no more, and its process stays."""
    now_s = [0.0]
    process = FakeProcess(None, has_engines=True)
    timeline = Timeline(tmp_path / "events", "learner")
    helper = GradientHelper(
        lambda: process,
        tmp_path / "files",
        prepare_s=60.0,
        answer_s=10.0,
        num_ahead=2,
        timeline=timeline,
        clock=lambda: now_s[0],
    )
    while helper.state is not State.IDLE:
        helper.poll()
    helper.take_devices(VERSION)
    now_s[0] = 11.0
    helper.poll()
    assert helper.state is State.RELEASING
    while helper.state is not State.IDLE:
        helper.poll()
    assert helper.stats.num_lost == 0 and OWN not in process.requests
    helper.close()
