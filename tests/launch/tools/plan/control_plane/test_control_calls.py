"""Calls a second, against the actor's own intervals, counted by hand."""

import pytest

from launch.tools.plan.control_plane.loads import control_calls
from tests.launch.tools.plan.setup import by_rounds, by_window


def test_quiet_actors_ask_as_often_as_their_duties_say():
    # Each: 1 claim/s, 0.5 heartbeats/s, a renewal each 10 s; 1 look at leases, 4 at versions, 0.1 at the end; with each
    # heartbeat a read of how many serve. Once a second one of them has the 10 heartbeats counted.
    calls = control_calls(by_window(U=2), num_actors=10, groups_per_s=0.0, share_with_room=1.0)
    assert calls.claims == pytest.approx(10)
    assert calls.writes == pytest.approx(10 * (0.5 + 0.1) + 1)
    assert calls.reads == pytest.approx(10 * (1 + 4 + 0.1 + 0.5))
    assert calls.rows == pytest.approx(10)
    assert calls.told == 0


def test_calls_grow_with_the_engines_and_not_with_their_square():
    few, many = (
        control_calls(by_window(U=2), num_actors=n, groups_per_s=0.0, share_with_room=0.0) for n in (400, 4000)
    )
    assert (many.rows, many.reads) == (pytest.approx(10 * few.rows), pytest.approx(10 * few.reads))
    # An actor alone has the count made with each of its heartbeats.
    alone = control_calls(by_window(U=2), num_actors=1, groups_per_s=0.0, share_with_room=0.0)
    assert alone.rows == 0.5


def test_each_group_of_a_window_wakes_who_has_room():
    # 20 groups/s: 20 offers/s wake the half that has room; each group is claimed once; 10 versions/s.
    calls = control_calls(by_window(U=2), num_actors=10, groups_per_s=20.0, share_with_room=0.5)
    assert calls.claims == pytest.approx(20 + 5 * 20)
    assert calls.reads == pytest.approx(10 * (20 + 10 + 0.1 + 0.5))
    # Told of: 20 offers, 20 groups, 20 claims, 10 versions; to 10 actors and the learner.
    assert calls.told == pytest.approx(11 * 70)


def test_a_round_is_offered_at_once():
    calls = control_calls(by_rounds(R=8, U=8), num_actors=1, groups_per_s=4.0, share_with_room=0.0)
    assert calls.claims == pytest.approx(4)
    assert calls.told == pytest.approx(2 * (0.5 + 4 + 4 + 0.5))


def test_full_engines_ask_only_when_something_ends():
    calls = control_calls(by_window(U=2), num_actors=1000, groups_per_s=3.0, share_with_room=0.0)
    assert calls.claims == pytest.approx(3)
