"""Waiting for what others do, over both engines: nothing is missed, and nobody waits for ever."""

import contextlib
import threading
import time

import pytest

from bridge.store.store_types import TOPICS
from tests.bridge.factories import make_announcement, make_group, make_ticket

LONG_S = 60.0
TICKET = make_ticket("a")


@pytest.fixture
def other(place):
    with contextlib.closing(place.open()) as opened:
        yield opened


def listening(store):
    """A mark of a store that hears: at the moment from which it does, all topics count as changed."""
    store.wait(dict.fromkeys(TOPICS, 0), TOPICS, timeout_s=LONG_S)
    return store.mark()


CHANGES = {
    "put_tickets": ("tickets", lambda s: s.put_tickets([make_ticket("new")])),
    "withdraw": ("tickets", lambda s: s.withdraw(["a"])),
    "reissue": ("tickets", lambda s: s.reissue(["a"])),
    "fence": ("tickets", lambda s: s.fence("x", "why")),
    "unfence": ("tickets", lambda s: s.unfence("z")),
    "release": ("tickets", lambda s: s.release("x", ["a"])),
    "fail_ticket": ("tickets", lambda s: s.fail_ticket("a", "why", max_attempts=2)),
    "put_group": ("groups", lambda s: s.put_group(make_group(TICKET))),
    "finish": ("run", lambda s: s.finish(3)),
    "claim": ("claims", lambda s: s.claim("y", limit=1, lease_s=9.0)),
    "announce": ("weights", lambda s: s.announce(make_announcement())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wait_ends_when_another_process_changes_its_topic(store, other, change):
    topic, act = CHANGES[change]
    other.put_tickets([TICKET])
    other.claim("x", limit=1, lease_s=9.0)
    other.put_tickets([make_ticket("open", order=1)])
    other.fence("z", "why")
    mark = listening(store)
    waiter = threading.Thread(target=store.wait, args=(mark, [topic]), kwargs={"timeout_s": LONG_S})
    waiter.start()
    act(other)
    waiter.join(LONG_S / 2)
    assert not waiter.is_alive()


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_waits_for_other_topics_is_not_woken(store, other, change):
    """Else each group that one actor hands in would have all of them ask for tickets, one after the other."""
    topic, act = CHANGES[change]
    other.put_tickets([TICKET])
    other.claim("x", limit=1, lease_s=9.0)
    other.put_tickets([make_ticket("open", order=1)])
    other.fence("z", "why")
    mark = listening(store)
    act(other)
    store.wait(mark, [topic], timeout_s=LONG_S)
    now = store.mark()
    assert {t for t in TOPICS if now[t] != mark[t]} == {topic}


def test_wait_returns_at_once_for_what_changed_since_the_mark(store, other):
    mark = listening(store)
    other.announce(make_announcement())
    store.wait(mark, ["weights"], timeout_s=LONG_S)  # would be 60 s
    store.wait(mark, ["weights", "groups"], timeout_s=LONG_S)


def test_wait_ends_for_a_change_of_its_own_process_too(store):
    mark = listening(store)
    store.put_tickets([TICKET])
    store.wait(mark, ["tickets"], timeout_s=LONG_S)


def test_wait_ends_at_its_bound_when_nothing_changes(store):
    mark = listening(store)
    store.wait(mark, TOPICS, timeout_s=0.05)
    store.wait(mark, (), timeout_s=0.0)
    store.wait(mark, TOPICS, timeout_s=-1.0)


def test_close_ends_every_wait(place):
    store = place.open()
    mark = listening(store)
    waiters = [threading.Thread(target=store.wait, args=(mark, TOPICS), kwargs={"timeout_s": LONG_S}) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    began_s = time.monotonic()
    store.close()
    for waiter in waiters:
        waiter.join(LONG_S)
    assert time.monotonic() - began_s < LONG_S / 2  # they did not wait to their bound


def test_ticket_taken_over_is_told(store, other, clock):
    other.put_tickets([TICKET])
    other.claim("x", limit=1, lease_s=1.0)
    clock.now_s += 2
    mark = listening(store)
    other.claim("y", limit=1, lease_s=1.0)
    store.wait(mark, ["tickets"], timeout_s=LONG_S)
