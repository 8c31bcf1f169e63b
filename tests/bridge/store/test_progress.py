"""Progress of tickets that are handed over, over both engines."""

import pytest

from bridge import codec
from bridge.progress_types import MAX_ACTORS
from bridge.rollout_types import Version
from bridge.store.store_types import FencedError
from tests.bridge.factories import as_plain, make_group, make_progress, make_ticket
from tests.bridge.store.engines import rows


@pytest.fixture
def handed_over(store):
    """A store whose ticket `t` actor a handed over."""
    store.put_tickets([make_ticket()])
    store.claim("a", limit=1, lease_s=60)
    store.hand_over("a", make_progress(step=3))
    return store


def claimed(store, actor="b", lease_s=60.0):
    (ticket,) = store.claim(actor, limit=1, lease_s=lease_s)
    return ticket


def test_next_claim_has_the_progress_and_waits_for_its_weights(handed_over):
    ticket = claimed(handed_over)
    assert as_plain(ticket.progress) == as_plain(make_progress(step=3))
    assert ticket.min_version == Version(incarnation=0, step=3)


def test_progress_of_older_weights_leaves_the_tickets_minimum_alone(store):
    store.put_tickets([make_ticket(min_version=Version(incarnation=1, step=9))])
    store.claim("a", limit=1, lease_s=60)
    store.hand_over("a", make_progress(step=3))
    assert claimed(store).min_version == Version(incarnation=1, step=9)


def test_hand_over_of_a_ticket_that_another_holds_changes_nothing(handed_over):
    claimed(handed_over)
    handed_over.hand_over("a", make_progress("t", 0, 1, step=4))
    assert handed_over.leased("b") == {"t"}
    handed_over.release("b", ["t"])
    ticket = claimed(handed_over)
    assert ticket.progress is not None and ticket.progress.newest.step == 3


def test_longer_progress_replaces_the_older(handed_over):
    claimed(handed_over)
    handed_over.hand_over("b", make_progress("t", 0, 1, step=4, actors=("a", "b")))
    assert as_plain(claimed(handed_over, "c").progress) == as_plain(make_progress("t", 0, 1, step=4, actors=("a", "b")))


KEEPS = {
    "released": lambda s, clock: s.release("b", ["t"]),
    "lease lost": lambda s, clock: setattr(clock, "now_s", clock.now_s + 61),
}


@pytest.mark.parametrize("how", KEEPS)
def test_progress_stays_while_the_next_actor_adds_none(handed_over, clock, how):
    claimed(handed_over)
    KEEPS[how](handed_over, clock)
    assert claimed(handed_over, "c").progress is not None


ENDS = {
    "reissued": lambda s: s.reissue(["t"]),
    "failed": lambda s: s.fail_ticket("t", "why", max_attempts=3),
    "rolled back": lambda s: (s.release("b", ["t"]), s.roll_back([], next_order=5, step=0)),
    "withdrawn and put again": lambda s: (s.withdraw(["t"]), s.put_tickets([make_ticket()])),
    "fence of who began it": lambda s: s.fence("a", "why"),
}


@pytest.mark.parametrize("how", ENDS)
def test_ticket_that_the_learner_offers_anew_has_none(handed_over, how):
    claimed(handed_over)
    ENDS[how](handed_over)
    assert claimed(handed_over, "c").progress is None
    assert rows(handed_over, "SELECT count(*) FROM progress WHERE run = :run") == [(0,)]


def test_progress_ends_with_its_group(handed_over):
    ticket = claimed(handed_over)
    assert handed_over.put_group(make_group(make_ticket(), actor="a&b")) is True
    assert ticket.progress is not None
    assert rows(handed_over, "SELECT count(*) FROM progress WHERE run = :run") == [(0,)]


@pytest.mark.parametrize("name", ["a", "b"])
def test_group_of_two_actors_is_refused_and_dropped_if_either_is_fenced(handed_over, name):
    claimed(handed_over)
    handed_over.put_group(make_group(make_ticket(), actor="a&b"))
    handed_over.fence(name, "why")
    assert handed_over.read_groups(after_seq=0, limit=9) == []
    with pytest.raises(FencedError):
        handed_over.put_group(make_group(make_ticket(), actor="a&b"))
    assert handed_over.counts()["open"] == 1


def test_fence_of_a_name_within_another_name_leaves_its_progress(store):
    store.put_tickets([make_ticket()])
    store.claim("aa", limit=1, lease_s=60)
    store.hand_over("aa", make_progress(actors=("aa", "b%")))
    for name in ("a", "b_"):
        store.fence(name, "why")
    assert claimed(store, "c").progress is not None


def test_progress_that_cannot_be_read_is_ignored(handed_over):
    rows(handed_over, "UPDATE progress SET actors = 'x', payload = :payload WHERE run = :run", payload=b"other")
    assert claimed(handed_over).progress is None


def test_progress_too_large_for_a_message_is_refused_and_the_ticket_stays(place):
    store = place.open(max_message_bytes=400)
    store.put_tickets([make_ticket()])
    store.claim("a", limit=1, lease_s=60)
    with pytest.raises(ValueError, match="at most 400 bytes"):
        store.hand_over("a", make_progress("t", *range(20)))
    assert store.leased("a") == {"t"}
    store.close()


def test_progress_of_too_many_actors_cannot_be_sent():
    with pytest.raises(ValueError, match="length"):
        codec.encode(make_progress(actors=tuple(f"a{i}" for i in range(MAX_ACTORS + 1))))
