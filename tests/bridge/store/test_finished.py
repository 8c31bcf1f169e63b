"""A run's end, over both engines: said once by who leads, seen by all, taken back by who leads next."""

import contextlib

import pytest

from bridge.rollout_types import Version
from bridge.store.store_types import Finished


@pytest.fixture
def second(place):
    with contextlib.closing(place.open()) as opened:
        yield opened


def test_finish_is_seen_by_all_with_version_and_time_and_said_again_changes_nothing(store, second, clock):
    store.acquire_leadership("a", lease_s=30)
    assert second.finished() is None
    clock.now_s = 2000.0
    store.finish(7)
    clock.now_s = 3000.0
    store.finish(7)
    assert second.finished() == store.finished() == Finished(Version(incarnation=0, step=7), 2000.0)


def test_learner_that_resigned_or_died_has_not_finished_the_run(store, second, clock):
    store.acquire_leadership("a", lease_s=30)
    store.release_leadership()
    assert second.finished() is None
    store.acquire_leadership("a", lease_s=30)
    clock.now_s += 1e6
    assert second.finished() is None


def test_finished_run_goes_on_as_soon_as_somebody_leads_it_and_is_finished_anew(store, second, clock):
    store.acquire_leadership("a", lease_s=30)
    store.finish(7)
    store.release_leadership()
    assert second.finished() is not None  # it outlives its learner
    assert second.acquire_leadership("b", lease_s=30) == 1
    assert store.finished() is None
    second.finish(9)
    assert store.finished() == Finished(Version(incarnation=1, step=9), clock.now_s)
