"""What a learner's pulse says while it starts, works and waits."""

import threading
from typing import Any

import pytest

from bridge.pulse import Doing, Pulse
from bridge.types import Heartbeat
from learner import heart as heart_module
from learner.heart import Heart, Stopped


class Setup:
    """A heart over a store with some actors' beats, at a time of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.actor_beat_s: float | None = None
        monkeypatch.setattr(heart_module.time, "time", lambda: self.now_s)
        monkeypatch.setattr(heart_module.time, "monotonic", lambda: self.now_s)
        self.stop = threading.Event()
        self.pulse = Pulse(Pulse.create())
        store: Any = self
        self.heart = Heart(store, self.stop, self.pulse)

    def heartbeats(self) -> list[Heartbeat]:
        if self.actor_beat_s is None:
            return []
        return [Heartbeat(process="actor-0", role="actor", pid=1, time_s=self.actor_beat_s)]

    def said(self) -> tuple[int, Doing]:
        sign = self.pulse.feel()
        return sign.num_works, sign.doing


@pytest.fixture
def s(monkeypatch):
    return Setup(monkeypatch)


def test_every_wait_and_every_part_of_the_work_is_felt(s):
    assert s.said() == (0, Doing.STARTING)
    s.heart.worked()
    assert s.said() == (1, Doing.STARTING)
    s.heart.check()
    assert s.said() == (2, Doing.WAITING)
    s.heart.worked()  # the first micro-batch is computed, the optimizer's step not yet compiled
    assert s.said() == (3, Doing.STARTING)
    s.heart.updated()
    assert s.said()[1] is Doing.WORKING
    s.heart.worked()
    assert s.said()[1] is Doing.WORKING
    s.heart.check()
    assert s.said()[1] is Doing.WAITING


def test_learner_without_a_live_actor_says_so_until_one_lives(s):
    s.heart.check()
    assert s.said()[1] is Doing.WAITING  # nobody looked yet
    s.now_s += heart_module.ACTORS_CHECK_S
    s.heart.check()
    assert s.said()[1] is Doing.ALONE
    s.actor_beat_s = s.now_s
    s.now_s += heart_module.ACTORS_CHECK_S / 2
    s.heart.check()
    assert s.said()[1] is Doing.ALONE
    s.now_s += heart_module.ACTORS_CHECK_S / 2 - 1
    s.actor_beat_s = s.now_s
    s.now_s += 1
    s.heart.check()
    assert s.said()[1] is Doing.WAITING


def test_stop_is_heard_while_waiting_and_after_an_update(s):
    s.stop.set()
    for hear in (s.heart.check, s.heart.updated):
        with pytest.raises(Stopped):
            hear()
