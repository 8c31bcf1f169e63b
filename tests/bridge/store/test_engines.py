"""How many engines serve: counted by the store, so that no actor reads the heartbeats of all."""

import contextlib

import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Version
from bridge.store.store_types import COUNTED_S, LIVE_S
from tests.bridge.factories import make_report

V = Version(incarnation=0, step=1)


def beat(store, name: str, places: int = 64, *, version: Version | None = V, is_shutting_down: bool = False) -> None:
    report = make_report(max_sequences=places, is_shutting_down=is_shutting_down)
    store.heartbeat(Heartbeat(process=name, role="actor", pid=1, time_s=0.0, version=version, report=report))


def test_engines_are_those_of_actors_that_serve(store, clock):
    assert store.engine_capacity() == {}
    store.heartbeat(Heartbeat(process="learner", role="learner", pid=1, time_s=0.0))
    store.heartbeat(Heartbeat(process="starting", role="actor", pid=1, time_s=0.0))
    beat(store, "no weights yet", version=None)
    beat(store, "leaving", is_shutting_down=True)
    for name, places in (("a", 64), ("b", 256), ("c", 64)):
        beat(store, name, places)
    assert store.engine_capacity(anew=True) == {64: 2, 256: 1}
    beat(store, "b", 8)
    beat(store, "c", is_shutting_down=True)
    clock.now_s += COUNTED_S
    assert store.engine_capacity() == {64: 1, 8: 1}


def test_engines_that_died_are_left_out_and_come_back_with_no_learner_there(store, clock):
    beat(store, "dies")
    clock.now_s += LIVE_S / 2
    beat(store, "lives")
    assert store.engine_capacity() == {64: 2}
    clock.now_s += LIVE_S / 2
    assert store.engine_capacity() == {64: 1}
    beat(store, "dies")
    clock.now_s += COUNTED_S
    assert store.engine_capacity() == {64: 2}


def test_engines_of_an_actor_that_closed_its_store_are_left_out_at_once(place):
    with contextlib.closing(place.open()) as stays:
        with contextlib.closing(place.open()) as goes:
            report = make_report(max_sequences=64)
            first = Heartbeat(process="a", role="actor", pid=1, time_s=0.0, version=V, report=report)
            goes.register_actor(first, location="here")
            assert stays.engine_capacity(anew=True) == {64: 1}
        assert stays.engine_capacity(anew=True) == {}


def test_engines_are_counted_once_for_all_who_ask_at_the_same_time(store, clock):
    beat(store, "a")
    assert store.engine_capacity() == {64: 1}
    beat(store, "b")
    clock.now_s += COUNTED_S / 2
    assert store.engine_capacity() == {64: 1}  # as it was counted
    assert store.engine_capacity(anew=True) == {64: 2}
    clock.now_s -= 3600  # a clock that was set back keeps nobody's count
    beat(store, "a")
    beat(store, "c")
    assert store.engine_capacity() == {64: 3}


@pytest.mark.parametrize("anew", [False, True])
def test_engines_answer_is_no_longer_for_many_than_for_few(store, clock, anew):
    for i in range(40):
        beat(store, f"actor-{i}", 64 if i % 2 else 32)
    clock.now_s += COUNTED_S
    assert store.engine_capacity(anew=anew) == {32: 20, 64: 20}
    asked: list[list] = []
    side = getattr(store, "actor", store)
    read, write = side._database.read, side._database.write
    side._database.read = lambda *a: asked.append(rows := read(*a)) or rows
    side._database.write = lambda *a: asked.extend(rows := write(*a)) or rows
    assert store.engine_capacity(anew=anew) == {32: 20, 64: 20}
    assert sum(len(rows) for rows in asked) == (2 if anew else 1)
