"""An actor's name is one live process's, over both engines: two that are started at once, wherever, are told apart."""

import concurrent.futures
import contextlib
import threading

import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.store.store_types import NAME_LEASE_S, NameTakenError
from tests.bridge.factories import make_ticket

BEAT = Heartbeat(process="far-1", role="actor", pid=1, time_s=0.0)
NUM_TOGETHER = 4


def side_of(store):
    """An actor's side, which beats in its own role."""
    return getattr(store, "actor", store)


@pytest.fixture
def sides(place):
    with contextlib.ExitStack() as stores:
        yield [side_of(stores.enter_context(contextlib.closing(place.open()))) for _ in range(NUM_TOGETHER)]


def test_of_actors_started_at_once_under_one_name_one_gets_it(sides):
    def start(number: int, name: str, together: threading.Barrier) -> int | None:
        beat = Heartbeat(process=name, role="actor", pid=number, time_s=0.0)
        together.wait()
        try:
            sides[number].register_actor(beat, location=f"host-{number}")
        except NameTakenError:
            return None
        return number

    with concurrent.futures.ThreadPoolExecutor(NUM_TOGETHER) as threads:
        for attempt in range(10):
            together = threading.Barrier(NUM_TOGETHER)
            started = [threads.submit(start, n, f"far-{attempt}", together) for n in range(NUM_TOGETHER)]
            winners = [n for n in (one.result() for one in started) if n is not None]
            assert len(winners) == 1
            (beat,) = [b for b in sides[0].heartbeats() if b.process == f"far-{attempt}"]
            assert beat.pid == winners[0]  # the others wrote nothing


def test_name_is_taken_over_when_its_lease_ends_and_its_former_actor_is_refused(sides, clock):
    first, second = sides[:2]
    first.register_actor(BEAT, location="host-a")
    clock.now_s += NAME_LEASE_S - 0.5
    with pytest.raises(NameTakenError, match="has the name far-1, at host-a"):
        second.register_actor(BEAT, location="host-b")
    first.heartbeat(BEAT)  # it lives, and keeps it
    clock.now_s += NAME_LEASE_S - 0.5
    with pytest.raises(NameTakenError):
        second.register_actor(BEAT, location="host-b")
    clock.now_s += 0.5
    second.register_actor(BEAT, location="host-b")
    with pytest.raises(NameTakenError, match="at host-b"):
        first.heartbeat(BEAT)


def test_actor_that_was_away_and_whose_name_nobody_took_goes_on(sides, clock):
    sides[0].register_actor(BEAT, location="host-a")
    clock.now_s += 1000
    sides[0].heartbeat(BEAT)
    with pytest.raises(NameTakenError):
        sides[1].register_actor(BEAT, location="host-b")


def test_name_is_free_for_the_same_place_at_once_and_for_others_when_its_actor_closes(sides):
    first, second, third = sides[:3]
    first.register_actor(BEAT, location="host-a")
    second.register_actor(BEAT, location="host-a")  # a lock there says that the first is dead
    second.close()
    third.register_actor(BEAT, location="host-b")


def test_closing_gives_back_no_name_that_another_has_taken(sides, clock):
    first, second, third = sides[:3]
    first.register_actor(BEAT, location="host-a")
    clock.now_s += NAME_LEASE_S
    second.register_actor(BEAT, location="host-b")
    first.close()
    with pytest.raises(NameTakenError):
        third.register_actor(BEAT, location="host-c")


def test_tickets_of_two_under_one_name_are_never_the_same(store, sides, clock):
    store.put_tickets(make_ticket(f"t{i}", order=i) for i in range(4))
    sides[0].register_actor(BEAT, location="host-a")
    held = {t.id for t in sides[0].claim("far-1", limit=2, lease_s=1000)}
    clock.now_s += NAME_LEASE_S  # it is cut off, and goes on with what it holds
    sides[1].register_actor(BEAT, location="host-b")
    assert held.isdisjoint(t.id for t in sides[1].claim("far-1", limit=4, lease_s=1000))
