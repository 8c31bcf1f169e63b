import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from learner.schedule import group_queue
from learner.schedule.group_filter import GroupFilter
from learner.schedule.group_queue import GroupQueue
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.learner.schedule.fakes import Marks


class DeadlockError(Exception):
    """The queue waits, and no more groups will come."""


def refuse_to_wait():
    raise DeadlockError


class Trainer:
    """What a queue's policy asks its learner: the step, and which tickets are open."""

    def __init__(self, store, tickets=()):
        self.store = store
        self.step = 0
        self.tickets = {t.id: t for t in tickets}
        self.departed = []
        self.group_filter: Any = None

    def queue(self, *, incarnation=0, restored_step=0, max_lag_steps=None, max_ready=None, on_wait=refuse_to_wait):
        rounds = SimpleNamespace(filter_zero_variance=False, train_start="group_ready")
        config: Any = SimpleNamespace(rounds=rounds, max_ready_groups=max_ready, max_lag_steps=max_lag_steps)
        planner: Any = SimpleNamespace(
            issue_up_to=lambda order, step: [],
            is_open=lambda id_: id_ in self.tickets,
            ticket=lambda id_: self.tickets[id_],
            arrive=lambda id_: [],
            forget_arrival=self.departed.append,
            num_left_in_round=9,
            num_left_in_update=1,
            renew_one=lambda id_: self.tickets[id_],
            num_sequences=lambda min_step, step, max_lag_steps: 1,
        )
        self.group_filter = GroupFilter(
            config,
            planner=planner,
            ticket_store=self.store,
            has_signal=lambda group: True,
            restores={incarnation: restored_step},
            step=self.step,
        )
        timeline: Any = Marks()
        return iter(
            GroupQueue(
                config,
                planner=planner,
                store=self.store,
                tickets=self.store,
                group_filter=self.group_filter,
                timeline=timeline,
                on_wait=on_wait,
            )
        )

    def put(self, *ids, oldest=0, newest=None, **fields):
        """An actor hands groups in, sampled by weights of steps `oldest` to `newest`."""
        newest = oldest if newest is None else newest
        rollouts = (make_rollout(step=oldest), make_rollout(step=newest))
        for id_ in ids:
            assert self.store.put_group(make_group(self.tickets[id_], rollouts=rollouts, **fields))


@pytest.fixture
def trainer(store):
    tickets = [make_ticket(i, order=n) for n, i in enumerate("abcdef")]
    store.put_tickets(tickets)
    return Trainer(store, tickets)


def ids(groups):
    return [g.ticket_id for g in groups]


def open_ids(store):
    return sorted(t.id for t in store.claim("somebody", limit=100, lease_s=60))


def test_next_is_woken_by_a_group_and_does_not_look_for_it(trainer, monkeypatch):
    monkeypatch.setattr(group_queue, "LOOK_S", 1000.0)
    waits = threading.Event()
    putting = threading.Thread(target=lambda: waits.wait(30) and trainer.put("d"))
    putting.start()
    assert ids(next(trainer.queue(on_wait=waits.set))) == ["d"]
    putting.join()


def test_take_ready_takes_what_is_there_up_to_the_limit(trainer):
    queue = trainer.queue()
    assert queue.take_ready(3) == []
    trainer.put(*"abc")
    assert ids(queue.take_ready(2)) == ["a", "b"]
    assert ids(queue.take_ready(5)) == ["c"]
    assert queue.take_ready(0) == []


def test_take_ready_reads_past_one_page_of_the_store(store):
    tickets = [make_ticket(f"{n:03d}", order=n) for n in range(150)]
    store.put_tickets(tickets)
    trainer = Trainer(store, tickets)
    trainer.put(*(t.id for t in reversed(tickets)))
    assert ids(trainer.queue().take_ready(1000)) == [t.id for t in reversed(tickets)]


def test_set_state_skips_the_ledger_and_hands_the_rest_out_again(trainer):
    before = trainer.queue()
    trainer.put(*"abcd")
    before.take_ready(2)
    state = json.loads(json.dumps(before.get_state()))
    before.take_ready(2)  # trained after the checkpoint, then killed

    after = trainer.queue(incarnation=1)
    after.set_state(state)
    assert ids(after.take_ready(9)) == ["c", "d"]
    assert after.get_state() == {"unacknowledged": ["a", "b", "c", "d"]}
    assert trainer.group_filter.dropped == {}


@pytest.mark.parametrize(
    ("incarnation", "oldest", "newest", "kept"),
    [
        (0, 0, 4, True),  # older weights, of a step the checkpoint has
        (0, 3, 5, False),  # one token after the checkpoint is enough
        (1, 5, 5, True),  # the same step by this learner's own weights
    ],
)
def test_group_of_abandoned_weights_is_dropped_and_asked_for_again(trainer, incarnation, oldest, newest, kept):
    trainer.step = 5
    queue = trainer.queue(incarnation=1, restored_step=4)
    trainer.put("a", oldest=oldest, newest=newest, incarnation=incarnation)
    assert ids(queue.take_ready(9)) == (["a"] if kept else [])
    assert trainer.group_filter.dropped == ({} if kept else {"abandoned": 1})
    assert ("a" in open_ids(trainer.store)) is not kept
    assert trainer.store.counts()["reissued"] == (0 if kept else 1)


def test_group_dropped_and_served_again_is_handed_out_once(trainer):
    queue = trainer.queue(incarnation=1, restored_step=4)
    trainer.put("a", oldest=9, incarnation=0)
    trainer.put("b", oldest=4, incarnation=0)
    assert ids(queue.take_ready(9)) == ["b"]
    trainer.put("a", oldest=4, incarnation=1)
    assert ids(queue.take_ready(9)) == ["a"]
    assert queue.take_ready(9) == []


@pytest.mark.parametrize(("oldest", "kept"), [(6, True), (7, True), (5, False)])
def test_group_over_the_lag_bound_is_dropped_and_asked_for_again(trainer, oldest, kept):
    trainer.step = 8
    trainer.put("a", oldest=oldest, newest=8)
    queue = trainer.queue(max_lag_steps=2)
    assert ids(queue.take_ready(9)) == (["a"] if kept else [])
    assert trainer.group_filter.dropped == ({} if kept else {"stale": 1})
    assert ("a" in open_ids(trainer.store)) is not kept


def test_group_that_is_not_wanted_is_acknowledged_not_asked_for_again(trainer):
    queue = trainer.queue()
    trainer.put("a", "b")
    del trainer.tickets["a"]
    assert ids(queue.take_ready(9)) == ["b"]
    assert trainer.group_filter.dropped == {"unwanted": 1}
    assert trainer.store.counts() | {"acknowledged": 1, "reissued": 0} == trainer.store.counts()
    assert "a" not in open_ids(trainer.store)


def test_ring_buffer_drops_the_oldest_whole_groups_and_asks_for_them_again(trainer):
    queue = trainer.queue(max_ready=2)
    trainer.put(*"abcd")
    queue.poll()
    assert trainer.group_filter.dropped == {"overflow": 2} and open_ids(trainer.store) == ["a", "b", "e", "f"]
    assert ids(queue.take_ready(9)) == ["c", "d"]


def test_fresh_from_keeps_older_groups_out_and_they_are_asked_for_again(trainer):
    queue = trainer.queue()
    trainer.put("a", oldest=1)
    queue.poll()
    trainer.group_filter.step = trainer.group_filter.fresh_from = 2
    trainer.put("b", oldest=1, newest=2)
    trainer.put("c", oldest=2)
    assert ids(queue.take_ready(9)) == ["c"]
    assert trainer.group_filter.dropped == {"off_policy": 2} and {"a", "b"} <= set(open_ids(trainer.store))


def test_take_back_forgets_what_was_handed_out_so_that_it_may_come_again(trainer):
    queue = trainer.queue()
    trainer.put(*"abc")
    queue.take_ready(3)
    queue.take_back(["b", "c"])
    assert queue.get_state() == {"unacknowledged": ["a"]}
    trainer.store.reissue(["b", "c"])
    trainer.put(*"cb")
    assert ids(queue.take_ready(9)) == ["c", "b"]


def test_keep_fresh_forgets_waiting_groups_of_older_weights(trainer):
    queue = trainer.queue()
    for i, oldest in zip("abc", (3, 2, 4), strict=True):
        trainer.put(i, oldest=oldest, newest=4)
    queue.poll()
    assert trainer.group_filter.drop_older_than(3) == {"a", "c"} and trainer.group_filter.dropped == {"off_policy": 1}
    assert trainer.departed == ["b"] and ids(queue.take_ready(9)) == ["a", "c"]


def test_a_waiting_group_that_is_dropped_leaves_the_planners_books_of_arrivals(trainer):
    queue = trainer.queue(max_lag_steps=1, max_ready=2)
    trainer.put(*"abc")
    queue.poll()
    assert trainer.departed == ["a"]
    trainer.group_filter.step = 2
    assert queue.take_ready(9) == [] and trainer.departed == ["a", "b", "c"]
