"""Acknowledged tickets: the newest stay known, older ones are forgotten and only counted."""

import random

import pytest

from bridge.store.admin import Runs
from bridge.store.sql import ticket_rows as sql_tickets
from bridge.store.sql.base import SharedStore
from bridge.store.sql.database import Statement
from tests.bridge.factories import make_group, make_ticket

KEPT = 8


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch):
    monkeypatch.setattr(sql_tickets, "KEPT_ORDERS", KEPT)


def ids_in(store) -> set[str]:
    inner = getattr(store, "learner", store)
    read = inner._database.read(inner._run, Statement("SELECT id FROM tickets WHERE run = :run", {"run": inner._run}))
    return {id_ for (id_,) in read}


def serve(store, tickets) -> None:
    store.put_tickets(tickets)
    for ticket in tickets:
        assert store.put_group(make_group(ticket, actor="a"))


def ticket(order: int, sample: int = 0):
    return make_ticket(f"{order:09d}.{sample}", order=order)


@pytest.mark.heavy
@pytest.mark.parametrize("num_samples", [1, 3])
def test_rows_stay_bounded_and_the_count_is_exact_over_many_updates(store, num_samples):
    most = 0
    for order in range(60):
        tickets = [ticket(order, i) for i in range(num_samples)]
        serve(store, tickets)
        store.acknowledge([t.id for t in tickets])
        most = max(most, len(ids_in(store)))
        assert store.counts()["acknowledged"] == num_samples * (order + 1)
    assert most <= num_samples * (KEPT + 2) + 1
    # The newest are known, so that a late copy is refused; the oldest are of no ticket.
    assert store.put_group(make_group(ticket(59))) is False
    with pytest.raises(KeyError):
        store.put_group(make_group(ticket(0)))


@pytest.mark.heavy
def test_open_and_failed_tickets_are_never_forgotten(store):
    store.put_tickets([ticket(0), ticket(1)])
    store.claim("a", limit=1, lease_s=60.0)
    store.fail_ticket(ticket(0).id, "no verdict", max_attempts=1)
    for order in range(2, 40):
        serve(store, [ticket(order)])
        store.acknowledge([ticket(order).id])
    assert {ticket(0).id, ticket(1).id} <= ids_in(store)
    assert store.failed() == {ticket(0).id: "no verdict"}
    assert store.counts() | {"reissued": 0} == {
        "open": 1, "claimed": 0, "done": 0, "acknowledged": 38, "failed": 1, "reissued": 0
    }  # fmt: skip


@pytest.mark.heavy
def test_learner_that_falls_back_to_an_older_checkpoint_gets_its_open_tickets_served_again(store):
    for order in range(40):
        serve(store, [ticket(order)])
        store.acknowledge([ticket(order).id])
    # What `RolloutStream.resume` does with the checkpoint of order 5, whose tickets 3 and 4 were open.
    open_tickets = [ticket(3), ticket(4)]
    assert store.put_tickets(open_tickets) == 2
    store.roll_back([t.id for t in open_tickets], next_order=5, step=0)
    assert [t.id for t in store.claim("b", limit=9, lease_s=60.0)] == [t.id for t in open_tickets]
    assert store.put_group(make_group(ticket(3))) is True


@pytest.mark.heavy
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("next_order", [0, 5, 31, 36])
def test_count_is_exact_after_a_rewind_past_forgotten_orders_and_on_the_way_back(store, num_samples, next_order):
    def tickets(order):
        return [ticket(order, i) for i in range(num_samples)]

    def acknowledge(order):
        serve(store, tickets(order))
        store.acknowledge([t.id for t in tickets(order)])

    for order in range(40):
        acknowledge(order) if order != 2 else store.put_tickets(tickets(2))
    for _ in range(2):
        open_orders = sorted({next_order - 2, 2} & set(range(next_order)))
        open_tickets = [t for order in open_orders for t in tickets(order)]
        for _ in range(2):  # a learner that was killed in its resumption
            store.put_tickets(open_tickets)
            store.roll_back([t.id for t in open_tickets], next_order=next_order, step=-1)
            num_open = len(open_tickets)
            assert store.counts()["acknowledged"] == num_samples * next_order - num_open
            assert store.counts()["open"] == num_open
        for order in range(next_order, 40):
            acknowledge(order)
            num_trained = num_samples * (order + 1) - num_open
            assert store.counts()["acknowledged"] == num_trained
        for order in set(open_orders) - {2}:
            acknowledge(order)
    lost = num_samples if next_order > 2 else 0
    assert store.counts()["acknowledged"] == num_samples * 40 - lost


@pytest.mark.heavy
def test_put_of_forgotten_tickets_that_is_made_twice_counts_them_once(store, monkeypatch):
    for order in range(40):
        serve(store, [ticket(order)])
        store.acknowledge([ticket(order).id])
    monkeypatch.setattr(sql_tickets, "new_request_id", lambda: "one and the same")
    for _ in range(2):  # the answer to the first was lost
        assert store.put_tickets([ticket(3), ticket(4), ticket(99)]) == 3
        assert store.counts() | {"reissued": 0} == {
            "open": 3, "claimed": 0, "done": 0, "acknowledged": 38, "failed": 0, "reissued": 0
        }  # fmt: skip


@pytest.mark.heavy
def test_count_after_a_rewind_takes_off_the_share_of_orders_where_some_have_no_ticket(store):
    orders = [order for order in range(90) if order % 3]
    for order in orders:
        serve(store, [ticket(order)])
        store.acknowledge([ticket(order).id])
    store.roll_back([], next_order=45, step=0)
    assert abs(store.counts()["acknowledged"] - 30) <= 1


@pytest.mark.heavy
def test_random_orders_of_acknowledgement_keep_count_and_bound(store):
    order_of, waiting, num = random.Random(3), [], 0
    for order in range(80):
        serve(store, [ticket(order)])
        waiting.append(ticket(order).id)
        if len(waiting) > 6:
            order_of.shuffle(waiting)
            store.acknowledge([waiting.pop() for _ in range(3)])
            num += 3
            assert store.counts()["acknowledged"] == num
    assert len(ids_in(store)) <= KEPT + 2 * 6 + 9


@pytest.mark.heavy
def test_backlog_of_an_older_build_goes_a_little_with_each_call(store, monkeypatch):
    monkeypatch.setattr(sql_tickets, "KEPT_ORDERS", 10**6)
    for order in range(50):
        serve(store, [ticket(order)])
        store.acknowledge([ticket(order).id])
    assert len(ids_in(store)) == 50
    monkeypatch.setattr(sql_tickets, "KEPT_ORDERS", KEPT)
    sizes = []
    for order in range(50, 90):
        serve(store, [ticket(order)])
        store.acknowledge([ticket(order).id])
        sizes.append(len(ids_in(store)))
    assert all(before - after <= 3 for before, after in zip(sizes, sizes[1:], strict=False))
    assert sizes[-1] <= KEPT + 3 and store.counts()["acknowledged"] == 90


def test_steps_metric_of_reissued_tickets_is_the_count(store):
    serve(store, [ticket(0), ticket(1)])
    assert store.num_reissued() == 0
    store.reissue([ticket(0).id, ticket(1).id])
    assert store.num_reissued() == store.counts()["reissued"] == 2


@pytest.mark.heavy
def test_runs_count_what_was_trained_and_forgotten(store):
    for order in range(30):
        serve(store, [ticket(order)])
        store.acknowledge([ticket(order).id])
    inner = getattr(store, "learner", store)
    (state,) = (s for s in Runs(inner._database, place="here", names=None).all() if s.run == inner._run)
    assert state.num_trained == 30


DELETIONS = {
    "withdraw": lambda s, ids: s.withdraw(ids),
    "reissue": lambda s, ids: s.reissue(ids),
    "acknowledge": lambda s, ids: s.acknowledge(ids),
    "fence": lambda s, _: s.fence("a", "why"),
}


@pytest.mark.parametrize("call", DELETIONS)
def test_large_groups_are_deleted_in_transactions_of_their_own(store, monkeypatch, call):
    monkeypatch.setattr(sql_tickets, "_BYTES_PER_TRANSACTION", 1)
    tickets = [make_ticket(f"t{i}", order=i) for i in range(3)]
    store.put_tickets(tickets)
    for ticket in tickets:
        store.put_group(make_group(ticket))
    num_made, write = [], SharedStore._write
    monkeypatch.setattr(SharedStore, "_write", lambda *a, **k: num_made.append(1) or write(*a, **k))
    DELETIONS[call](store, [t.id for t in tickets])
    assert len(num_made) == 3 and store.counts()["done"] == 0
