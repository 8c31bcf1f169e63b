"""Groups served as single samples: split, put together wherever they came from, and nothing lost on the way."""

import contextlib
import random
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.rollout_types import Version
from bridge.store.open import SqliteStore
from learner.schedule.sample_tickets import SampleTickets, join, split
from tests.bridge.factories import make_group, make_rollout, make_ticket


@pytest.fixture
def inner(tmp_path):
    with contextlib.closing(SqliteStore(tmp_path / "store.db")) as opened:
        yield opened


def over(inner, *, K=2, requests=2):
    return SampleTickets(inner, num_samples=K, num_requests=requests)


def serve(inner, actor="a", *, limit=100, reward=0.0, pick=None, step=0):
    tickets = inner.claim(actor, limit=limit, lease_s=60)
    for ticket in pick(tickets) if pick else tickets:
        rollout = make_rollout(step=step, reward=reward or float(ticket.id.rpartition(".")[2] or 0))
        inner.put_group(make_group(ticket, actor=actor, rollouts=(rollout,) * ticket.num_samples))
    return tickets


def read(store, after_seq=0):
    return store.read_groups(after_seq=after_seq, limit=100)


def test_split_gives_one_ticket_a_request():
    parts = split(make_ticket("g", order=3, num_samples=2, num_requests=3))
    assert [(t.id, t.order, t.num_samples, t.num_requests) for t in parts] == [
        ("g.0", 3, 1, 1),
        ("g.1", 3, 1, 1),
        ("g.2", 3, 1, 1),
    ]


def test_group_of_samples_from_two_actors_is_put_together_when_the_last_is_in(inner):
    store = over(inner)
    store.put_tickets([make_ticket("g", num_samples=2)])
    serve(inner, "b", limit=1, step=1)
    assert read(store) == []
    serve(inner, "a", limit=1, step=4)
    (stored,) = read(store)
    group = stored.group
    assert (group.ticket_id, group.makers, group.actors) == ("g", ("b", "a"), {"a", "b"})
    assert [r.reward for r in group.rollouts] == [0.0, 1.0] and (group.min_step, group.max_step) == (1, 4)
    assert read(store, stored.seq) == []


def test_a_reader_that_starts_over_gets_everything_unacknowledged_again(inner):
    store = over(inner)
    store.put_tickets([make_ticket(i, order=n) for n, i in enumerate("gh")])
    serve(inner)
    first = read(store)
    assert [s.group.ticket_id for s in first] == ["g", "h"]
    store.acknowledge(["g"])
    assert [s.group.ticket_id for s in read(over(inner))] == ["h"] == [s.group.ticket_id for s in read(store)]
    assert inner.counts()["acknowledged"] == 2


def test_samples_of_a_group_that_is_trained_are_not_held_until_its_checkpoint(inner):
    is_open = {"g": True}
    store = SampleTickets(inner, num_samples=2, num_requests=2, is_open=lambda id_: is_open[id_])
    store.put_tickets([make_ticket("g", num_samples=2)])
    serve(inner)
    ((seq, group),) = ((s.seq, s.group) for s in read(store))
    held = [weakref.ref(rollout.tokens) for rollout in group.rollouts]
    del group
    assert read(store, seq) == [] and all(ref() is not None for ref in held)  # those that are fresh may stay
    is_open["g"] = False
    assert read(store, seq) == [] and [ref() for ref in held] == [None, None]
    store.acknowledge(["g"])
    assert inner.counts()["acknowledged"] == 2


def test_a_race_takes_the_first_k_samples_and_withdraws_the_rest(inner):
    store = over(inner, K=2, requests=4)
    store.put_tickets([make_ticket("g", num_samples=2, num_requests=4)])
    held = serve(inner, pick=lambda tickets: [tickets[3], tickets[1]])
    (stored,) = read(store)
    assert [r.reward for r in stored.group.rollouts] == [1.0, 3.0]
    assert inner.leased("a") == set() and inner.claim("b", limit=9, lease_s=60) == []
    with pytest.raises(KeyError):
        inner.put_group(make_group(held[0], rollouts=(make_rollout(),)))


def test_a_sample_too_late_for_its_race_is_dropped(inner):
    store = over(inner, K=1, requests=3)
    store.put_tickets([make_ticket("g", num_samples=1, num_requests=3)])
    serve(inner)  # all three, before the learner looks
    assert len(read(store)) == 1
    assert [s.group.ticket_id for s in inner.read_groups(after_seq=0, limit=9)] == ["g.0"]


def test_reissue_and_withdraw_are_of_whole_groups(inner):
    store = over(inner)
    store.put_tickets([make_ticket(i, order=n) for n, i in enumerate("gh")])
    serve(inner, limit=3)  # both of g, one of h
    (stored,) = read(store)
    assert store.reissue(["g"]) == 2
    store.withdraw(["h"])
    assert [t.id for t in serve(inner, "b", reward=7.0)] == ["g.0", "g.1"]
    (again,) = read(store, stored.seq)
    assert [r.reward for r in again.group.rollouts] == [7.0, 7.0] and again.group.actor == "b"


def test_stale_sample_alone_is_made_again_and_its_siblings_stay(inner):
    store = over(inner, K=3, requests=3)
    store.put_tickets([make_ticket("g", num_samples=3, num_requests=3)])
    serve(inner, "old", limit=1, step=1)
    serve(inner, "new", step=5)
    (stored,) = read(store)
    assert store.reissue(["g"], older_than=2) == 1
    assert [t.id for t in serve(inner, "again", step=6, reward=9.0)] == ["g.0"]
    (again,) = read(store, stored.seq)
    assert [r.reward for r in again.group.rollouts] == [9.0, 1.0, 2.0]
    assert (again.group.min_step, again.group.actors) == (5, {"again", "new"})
    assert store.reissue(["g"], older_than=9) == 3  # all of them


@pytest.mark.parametrize("older_than", [None, 3, 1])
@pytest.mark.parametrize(("K", "requests"), [(2, 3), (2, 5), (3, 4)])
def test_group_whose_race_was_decided_runs_it_again_and_completes_or_is_known_to_have_failed(
    store, K, requests, older_than
):
    """After a reissue K samples are wanted again: it takes as many failures as before until the learner is told."""
    groups = over(store, K=K, requests=requests)
    groups.put_tickets([make_ticket("g", num_samples=K, num_requests=requests)])
    serve(store, pick=lambda tickets: tickets[:1], step=0)
    for i in range(1, K):
        store.put_group(make_group(make_ticket(f"g.{i}"), actor="b", rollouts=(make_rollout(step=2),)))
    (stored,) = read(groups)
    num_kept = K - 1 if older_than == 1 else 0
    assert groups.reissue(["g"], older_than=older_than) == K - num_kept
    offered = store.claim("c", limit=99, lease_s=60)
    assert len(offered) == requests - num_kept
    for failed, ticket in enumerate(offered[:-1], 1):
        store.fail_ticket(ticket.id, "judge down", max_attempts=1)
        assert ("g" in groups.failed()) == (failed > requests - K)
    if requests - K == len(offered) - 1:  # the last one completes it, all others failed
        store.put_group(make_group(offered[-1], actor="c", rollouts=(make_rollout(step=4),)))
        assert len(read(groups, stored.seq)) == 1


def test_group_of_samples_by_several_incarnations_names_the_newest_weights_of_each():
    parts = [
        make_group(
            make_ticket(f"g.{i}"), rollouts=(make_rollout(step=step),), incarnation=incarnation, older_versions=old
        )
        for i, (incarnation, step, old) in enumerate(
            [(1, 4, (Version(incarnation=0, step=3),)), (0, 2, ()), (2, 4, ()), (1, 5, ())]
        )
    ]
    group = join("g", parts)
    assert (group.incarnation, [str(v) for v in group.older_versions]) == (2, ["0:3", "1:5"])


def test_unclaimed_samples_are_counted_as_groups_and_evaluations_not_at_all(inner):
    store = over(inner)
    store.put_tickets([make_ticket("a", num_samples=2), make_ticket("b", order=1, num_samples=2)])
    inner.put_tickets([make_ticket("e", kind="eval")])
    assert store.num_unclaimed() == 2
    inner.claim("a", limit=4, lease_s=60)  # the evaluation among them
    assert store.num_unclaimed() == 1


def test_replaced_prompt_under_the_same_id_is_put_together_anew(inner):
    store = over(inner)
    store.put_tickets([make_ticket("g")])
    serve(inner, limit=1)
    assert read(store) == []
    store.withdraw(["g"])
    store.put_tickets([make_ticket("g", prompt_tokens=np.array([3], np.int32))])
    serve(inner)
    (stored,) = read(store, 1)
    assert stored.group.prompt_tokens.tolist() == [3] and len(stored.group.rollouts) == 2


def test_samples_of_another_prompt_are_made_again_not_joined(inner):
    """After a restart an order may have another prompt; samples of the old one may be here, or be read later."""
    for read_first in (True, False):
        store = over(inner)
        store.put_tickets([make_ticket(f"g{read_first}")])
        serve(inner, limit=1)
        store = over(inner)  # the learner is killed and starts again
        if read_first:
            assert read(store) == []
        store.put_tickets([make_ticket(f"g{read_first}", prompt_tokens=np.array([3], np.int32))])
        inner.withdraw([f"g{read_first}.1"])  # `roll_back` forgets what was not made yet
        store.put_tickets([make_ticket(f"g{read_first}", prompt_tokens=np.array([3], np.int32))])
        assert read(store) == []
        serve(inner, "b", reward=1.0)
        (stored,) = read(store)
        assert stored.group.prompt_tokens.tolist() == [3] and stored.group.actors == {"b"}
        assert [r.reward for r in stored.group.rollouts] == [1.0, 1.0]
        store.acknowledge([stored.group.ticket_id])


def test_samples_of_abandoned_weights_are_made_again_before_the_group_is_joined(inner):
    store = over(inner)
    store.put_tickets([make_ticket("g")])
    serve(inner, limit=1, step=12)
    inner.record_restore(1, 10)  # a learner went back to step 10
    store = over(inner)
    store.put_tickets([make_ticket("g")])
    assert read(store) == []
    tickets = serve(inner, step=10)
    assert [t.id for t in tickets] == ["g.0", "g.1"]
    (stored,) = read(store)
    assert stored.group.max_step == 10


def test_waiting_for_a_first_group_reads_each_sample_once(inner):
    store = over(inner)
    store.put_tickets([make_ticket("g")])
    serve(inner, limit=1)
    reads = []

    class Counting(SqliteStore):
        def read_groups(self, **fields):
            reads.append(fields["after_seq"])
            return inner.read_groups(**fields)

    store._store = Counting.__new__(Counting)
    store._store.restores = inner.restores
    assert [read(store), read(store), read(store)] == [[], [], []]
    assert reads == [0, 1, 1, 1]


def test_fenced_actors_samples_are_made_again(inner):
    store = over(inner)
    store.put_tickets([make_ticket("g")])
    serve(inner, "bad", limit=1)
    assert read(store) == []
    store.fence("bad", "off")
    assert [t.id for t in serve(inner, "good")] == ["g.0", "g.1"]
    (stored,) = read(store, 1)
    assert stored.group.actors == {"good"}


def test_failed_sample_names_its_group(inner):
    store = over(inner)
    store.put_tickets([make_ticket("g")])
    inner.claim("a", limit=1, lease_s=60)
    inner.fail_ticket("g.0", "no verdict", max_attempts=1)
    assert store.failed() == {"g": "no verdict"}
    store.withdraw(["g"])
    assert store.failed() == {} and inner.counts()["open"] == 0


def test_failed_sample_of_a_race_names_its_group_only_when_too_few_are_left(inner):
    store = over(inner, K=2, requests=4)
    store.put_tickets([make_ticket("g", num_samples=2, num_requests=3)])  # this one races with one sample more
    serve(inner, pick=lambda tickets: tickets[:1])
    inner.fail_ticket("g.1", "no verdict", max_attempts=1)
    assert store.failed() == {}
    inner.fail_ticket("g.2", "no verdict", max_attempts=1)
    assert store.failed() == {"g": "no verdict"}


def test_race_is_won_beside_a_sample_that_failed(inner):
    store = over(inner, K=2, requests=3)
    store.put_tickets([make_ticket("g", num_samples=2, num_requests=3)])
    inner.claim("a", limit=1, lease_s=60)
    inner.fail_ticket("g.0", "no verdict", max_attempts=1)
    serve(inner)
    (stored,) = read(store)
    assert [r.reward for r in stored.group.rollouts] == [1.0, 2.0]
    assert store.failed() == {} and inner.counts()["failed"] == 0


def test_join_keeps_the_newest_incarnation_and_the_whole_time():
    ticket = make_ticket("g.0", num_samples=1)
    parts = [make_group(ticket, incarnation=i, started_s=3.0 - i, finished_s=5.0 + i) for i in range(2)]
    group = join("g", parts)
    assert (group.incarnation, group.started_s, group.finished_s) == (1, 2.0, 6.0)


@pytest.mark.heavy
@given(seed=st.integers(0, 10**6), num_groups=st.integers(1, 6), extra=st.integers(0, 2))
def test_every_group_is_read_once_whatever_the_order_of_arrival(tmp_path_factory, seed, num_groups, extra):
    rng = random.Random(seed)
    inner = SqliteStore(tmp_path_factory.mktemp("s") / "store.db")
    store = over(inner, K=2, requests=2 + extra)
    store.put_tickets(make_ticket(f"g{n}", order=n, num_samples=2, num_requests=2 + extra) for n in range(num_groups))
    held = {a: inner.claim(a, limit=4 * num_groups, lease_s=60, among=2) for a in "ab"}
    seq, seen = 0, []
    parts = [(a, t) for a, tickets in held.items() for t in tickets]
    assert len(parts) == num_groups * (2 + extra)
    for actor, ticket in rng.sample(parts, len(parts)):
        with contextlib.suppress(KeyError):  # withdrawn: its race is over
            inner.put_group(make_group(ticket, actor=actor, rollouts=(make_rollout(),)))
        if rng.random() < 0.5:
            for s in read(store, seq):
                seq = s.seq
                seen.append(s.group.ticket_id)
    seen += [s.group.ticket_id for s in read(store, seq)] if seq else [s.group.ticket_id for s in read(store)]
    assert sorted(seen) == [f"g{n}" for n in range(num_groups)]
    inner.close()
