"""Tickets for one actor alone, by which one that is fenced may show that it is clean again."""

import pytest

from bridge.store.store_types import FencedError, UnfitGroupError
from tests.bridge.factories import make_group, make_ticket
from tests.bridge.store.test_store import claim_ids, stored_ids

PROBE = make_ticket("p", kind="probe", order=-1)


def test_ticket_for_one_actor_is_claimed_by_it_alone(store):
    store.put_tickets([make_ticket("a")])
    assert store.put_tickets([PROBE], only_for="x") == 1
    assert claim_ids(store, "y") == ["a"]
    assert claim_ids(store, "x") == ["p"]


def test_fenced_actor_serves_what_is_for_it_alone_and_nothing_else(store):
    ticket = make_ticket("a")
    store.put_tickets([ticket])
    store.fence("x", "off by 2.2")
    store.put_tickets([PROBE], only_for="x")
    assert claim_ids(store, "x") == ["p"]
    assert claim_ids(store, "x") == []  # it holds it: no more, and no error
    with pytest.raises(FencedError, match="off by 2.2"):
        store.put_group(make_group(ticket, actor="x"))
    assert store.put_group(make_group(PROBE, actor="x")) is True
    assert store.put_group(make_group(PROBE, actor="x")) is False
    with pytest.raises(FencedError, match="off by 2.2"):
        claim_ids(store, "x")
    assert stored_ids(store, kind="probe") == ["p"] and stored_ids(store) == []


def test_group_of_a_ticket_for_another_actor_refused(store):
    store.put_tickets([PROBE], only_for="x")
    with pytest.raises(UnfitGroupError, match="reserved for actor x"):
        store.put_group(make_group(PROBE, actor="y"))
    assert store.put_group(make_group(PROBE, actor="x")) is True


def test_lease_of_a_ticket_for_one_actor_that_ran_out_is_offered_to_it_again(store, clock):
    store.put_tickets([PROBE], only_for="x")
    assert claim_ids(store, "x", lease_s=1.0) == ["p"]
    clock.now_s += 2
    assert claim_ids(store, "y") == []
    assert claim_ids(store, "x") == ["p"]


def test_unfence_lets_an_actor_claim_and_put_again(store):
    ticket = make_ticket("a")
    store.put_tickets([ticket])
    store.fence("x", "why")
    store.unfence("x")
    store.unfence("nobody")
    assert store.fenced("x") is None and store.fenced_actors() == set()
    assert claim_ids(store, "x") == ["a"]
    assert store.put_group(make_group(ticket, actor="x")) is True


def test_tickets_for_one_actor_are_no_part_of_what_all_share(store):
    store.put_tickets([make_ticket("a"), make_ticket("b")])
    store.put_tickets([make_ticket("c"), make_ticket("d")], only_for="z")
    assert store.num_unclaimed() == 2
    assert len(store.claim("x", limit=9, lease_s=9, among=2)) == 1
