"""What a learner's pulse says while it starts, works and waits."""

import threading
from typing import Any, cast

import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.liveness import Activity, Liveness
from bridge.store.store_types import StoreLostError, SupersededLearnerError
from learner import heartbeat as heart_module
from learner.distributed.channel import SingleProcess
from learner.heartbeat import LearnerHeartbeat, Stopped


class Setup:
    """A heart over a store with some actors' beats, at a time of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here_s = 1000.0
        self.actor_beat_s: float | None = None
        monkeypatch.setattr(heart_module.time, "time", lambda: self.here_s)
        monkeypatch.setattr(heart_module.time, "monotonic", lambda: self.here_s)
        self.stop = threading.Event()
        self.liveness = Liveness(Liveness.create())
        store: Any = self
        self.heartbeat = LearnerHeartbeat(store, self.stop, self.liveness, leader_lease_s=30.0)

    def heartbeats(self) -> list[Heartbeat]:
        if self.actor_beat_s is None:
            return []
        return [Heartbeat(process="actor-0", role="actor", pid=1, time_s=self.actor_beat_s - 5000.0)]

    def now_s(self) -> float:
        """The store's clock, which is not this machine's."""
        return self.here_s - 5000.0

    def said(self) -> tuple[int, Activity]:
        sign = self.liveness.read()
        return sign.num_works, sign.activity


@pytest.fixture
def s(monkeypatch):
    return Setup(monkeypatch)


def test_every_wait_and_every_part_of_the_work_is_felt(s):
    assert s.said() == (0, Activity.STARTING)
    s.heartbeat.report_progress()
    assert s.said() == (1, Activity.STARTING)
    s.heartbeat.check()
    assert s.said() == (2, Activity.WAITING)
    s.heartbeat.report_progress()  # the first micro-batch is computed, the optimizer's step not yet compiled
    assert s.said() == (3, Activity.STARTING)
    s.heartbeat.updated()
    assert s.said()[1] is Activity.WORKING
    s.heartbeat.report_progress()
    assert s.said()[1] is Activity.WORKING
    s.heartbeat.check()
    assert s.said()[1] is Activity.WAITING


def test_learner_without_a_live_actor_says_so_until_one_lives(s):
    s.heartbeat.check()
    assert s.said()[1] is Activity.WAITING  # nobody looked yet
    s.here_s += heart_module.ACTORS_CHECK_S
    s.heartbeat.check()
    assert s.said()[1] is Activity.NO_ACTORS
    s.actor_beat_s = s.here_s
    s.here_s += heart_module.ACTORS_CHECK_S / 2
    s.heartbeat.check()
    assert s.said()[1] is Activity.NO_ACTORS
    s.here_s += heart_module.ACTORS_CHECK_S / 2 - 1
    s.actor_beat_s = s.here_s
    s.here_s += 1
    s.heartbeat.check()
    assert s.said()[1] is Activity.WAITING


def test_learner_of_a_run_without_actors_misses_none(s):
    s.heartbeat = LearnerHeartbeat(cast(Any, s), s.stop, s.liveness, leader_lease_s=30.0, has_actors=False)
    s.here_s += 2 * heart_module.ACTORS_CHECK_S
    s.heartbeat.check()
    assert s.said()[1] is Activity.WAITING


def test_stop_is_heard_while_waiting_and_after_an_update(s):
    s.stop.set()
    for hear in (s.heartbeat.check, s.heartbeat.updated):
        with pytest.raises(Stopped):
            hear()


class Lead:
    """A store whose lead can be lost."""

    def __init__(self) -> None:
        self.extended: list[float] = []
        self.error: Exception | None = None
        self.kept = threading.Event()

    def heartbeat(self, beat: Heartbeat) -> None:
        pass

    def renew_leadership(self, *, lease_s: float) -> None:
        if self.error is not None:
            raise self.error
        self.extended.append(lease_s)
        self.kept.set()


def heart_over(lead: Any) -> LearnerHeartbeat:
    return LearnerHeartbeat(lead, threading.Event(), Liveness(Liveness.create()), leader_lease_s=0.03)


def test_beating_heart_keeps_the_lead_until_it_is_stopped():
    lead = Lead()
    heartbeat = heart_over(lead)
    heartbeat.start()
    assert lead.kept.wait(30)
    heartbeat.check()
    heartbeat.stop()
    count = len(lead.extended)
    assert set(lead.extended) == {0.03}
    heartbeat.stop()
    assert len(lead.extended) == count


@pytest.mark.parametrize("error", [SupersededLearnerError("another one leads"), StoreLostError("away")])
def test_lost_lead_or_store_is_told_where_the_learner_next_waits(error):
    lead = Lead()
    lead.error = error
    heartbeat = heart_over(lead)
    heartbeat.start()
    heartbeat._thread.join(30)
    with pytest.raises(type(error)):
        heartbeat.check()
    heartbeat.stop()


class Away(Lead):
    """A store whose server is away."""

    def __init__(self, back: threading.Event) -> None:
        super().__init__()
        self._back = back

    def heartbeat(self, beat: Heartbeat) -> None:
        self._back.wait(60)


def test_other_process_that_is_asked_to_end_is_heard_while_the_store_is_away(monkeypatch):
    monkeypatch.setattr(heart_module, "STOP_POLL_S", 0.01)
    back, stop, hosts = threading.Event(), threading.Event(), SingleProcess()
    store: Any = Away(back)
    heartbeat = LearnerHeartbeat(store, stop, Liveness(Liveness.create()), leader_lease_s=0.03, hosts=hosts)
    heartbeat.start()
    try:
        hosts.request_stop()
        assert stop.wait(30)
        with pytest.raises(Stopped):
            heartbeat.check()
    finally:
        back.set()
        heartbeat.stop()
