"""One learner a run: who leads, for how long, and what an older one may still do (nothing)."""

import contextlib
import threading

import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.store.sql.learner_side import LearnerStore
from bridge.store.store_types import LearnerLivesError, SupersededLearnerError
from tests.bridge.factories import make_announcement, make_group, make_run_card, make_ticket


@pytest.fixture
def second(place):
    with contextlib.closing(place.open()) as opened:
        yield opened


def test_lead_counts_up_and_one_elsewhere_waits_for_the_lease(store, second, clock):
    assert store.acquire_leadership("host-a:/runs/1", lease_s=30) == 0
    with pytest.raises(LearnerLivesError, match="host-a:/runs/1.* 30 s"):
        second.acquire_leadership("host-b:/runs/1", lease_s=30)
    clock.now_s += 20
    store.renew_leadership(lease_s=30)
    clock.now_s += 29.9
    with pytest.raises(LearnerLivesError):
        second.acquire_leadership("host-b:/runs/1", lease_s=30)
    clock.now_s += 0.1
    assert second.acquire_leadership("host-b:/runs/1", lease_s=30) == 1


def test_lead_at_the_same_place_takes_over_at_once(store, second):
    assert store.acquire_leadership("here", lease_s=30) == 0
    assert second.acquire_leadership("here", lease_s=30) == 1
    with pytest.raises(SupersededLearnerError, match="incarnation is 1, this one's 0"):
        store.renew_leadership(lease_s=30)


def test_keep_lead_works_after_the_lease_until_somebody_takes_it(store, second, clock):
    store.acquire_leadership("a", lease_s=30)
    clock.now_s += 1000
    store.renew_leadership(lease_s=30)
    with pytest.raises(LearnerLivesError):
        second.acquire_leadership("b", lease_s=30)


def test_resign_lets_one_elsewhere_lead_at_once_also_by_closing(place, store, second):
    store.release_leadership()  # none is fine
    store.acquire_leadership("a", lease_s=30)
    store.release_leadership()
    assert second.acquire_leadership("b", lease_s=30) == 1
    second.close()
    with contextlib.closing(place.open()) as third:
        assert third.acquire_leadership("c", lease_s=30) == 2


def test_resign_of_an_older_learner_leaves_the_newer_ones_lead(store, second, place):
    store.acquire_leadership("a", lease_s=30)
    second.acquire_leadership("a", lease_s=30)
    store.release_leadership()
    with contextlib.closing(place.open()) as third, pytest.raises(LearnerLivesError):
        third.acquire_leadership("b", lease_s=30)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
def test_lead_that_is_over_at_once_refused(store, lease_s):
    with pytest.raises(ValueError, match="lease_s"):
        store.acquire_leadership("a", lease_s=lease_s)


WRITES = {
    "put_tickets": lambda s: s.put_tickets([make_ticket("new")]),
    "acknowledge": lambda s: s.acknowledge(["done"]),
    "reissue": lambda s: s.reissue(["done"]),
    "withdraw": lambda s: s.withdraw(["done"]),
    "withdraw_pinned": lambda s: s.withdraw_pinned(),
    "roll_back": lambda s: s.roll_back(["acknowledged"], next_order=0, step=0),
    "fence": lambda s: s.fence("x", "why"),
    "unfence": lambda s: s.unfence("f"),
    "announce": lambda s: s.announce(make_announcement(step=2)),
    "finish": lambda s: s.finish(3),
    "put_run_card": lambda s: s.put_run_card(make_run_card(name="other"), {}),
    "record_restore": lambda s: s.record_restore(7, 7),
    "renew_leadership": lambda s: s.renew_leadership(lease_s=9),
    "heartbeat": lambda s: s.heartbeat(Heartbeat(process="learner", role="learner", pid=9, time_s=0.0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_superseded_learner_writes_nothing(store, second, write):
    tickets = {i: make_ticket(i) for i in ("done", "acknowledged")}
    store.acquire_leadership("a", lease_s=30)
    store.put_tickets([*tickets.values(), make_ticket("probe", kind="probe")])
    for ticket in tickets.values():
        store.put_group(make_group(ticket, actor="x"))
    store.acknowledge(["acknowledged"])
    store.fence("f", "why")
    store.announce(make_announcement(step=1))
    store.put_run_card(make_run_card(), {})
    second.acquire_leadership("a", lease_s=30)
    before = contents(second)
    with pytest.raises(SupersededLearnerError):
        WRITES[write](store)
    assert contents(second) == before
    assert WRITES[write](second) in (None, 0, 1)  # the one that leads may
    assert contents(second) != before or write == "renew_leadership"


def contents(store):
    groups = [(s.seq, s.group.ticket_id) for s in store.read_groups(after_seq=0, limit=9)]
    return (
        store.counts(),
        groups,
        store.fenced_actors(),
        store.restores(),
        store.announced().manifest.version,
        store.run_card(),
        store.heartbeats(),
        store.finished(),
    )


def test_who_never_led_is_not_guarded(store, second):
    second.acquire_leadership("a", lease_s=30)
    assert store.put_tickets([make_ticket("a")]) == 1


def test_announcement_that_is_repeated_holds_up_newer_ones_until_it_is_made(store, monkeypatch):
    store.acquire_leadership("here", lease_s=60)
    store.announce(make_announcement())
    were_held_up, announce = [], LearnerStore._announce

    def watched(learner, announcement):
        def attempt():
            were_held_up.append(not learner._announcing.acquire(blocking=False))

        other = threading.Thread(target=attempt)
        other.start()
        other.join()
        announce(learner, announcement)

    monkeypatch.setattr(LearnerStore, "_announce", watched)
    store._announce_again()
    assert were_held_up == [True]
