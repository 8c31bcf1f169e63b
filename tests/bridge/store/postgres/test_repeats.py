"""Calls whose connection was lost in their middle are made again; what the first did is not done twice."""

import dataclasses

import psycopg
import pytest

from bridge.store.postgres import postgres_database
from tests.bridge.factories import (
    make_announcement,
    make_group,
    make_progress,
    make_rollout,
    make_run_card,
    make_ticket,
)
from tests.bridge.store.engines import EachInItsRole, rows

TICKETS = {i: make_ticket(i, order=n) for n, i in enumerate(("open", "claimed", "done", "acknowledged", "spare"))}

CALLS = {
    "put_tickets": lambda s: s.put_tickets([make_ticket("n1"), make_ticket("n2"), TICKETS["open"]]),
    "claim": lambda s: [t.id for t in s.claim("y", limit=1, lease_s=60)],
    "renew": lambda s: s.renew("x", ["claimed", "open"], lease_s=60),
    "release": lambda s: s.release("x", ["claimed"]),
    "hand_over": lambda s: s.hand_over("x", make_progress("claimed", actors=("x",))),
    "fail_ticket": lambda s: s.fail_ticket("claimed", "why", max_attempts=2),
    "put_group": lambda s: s.put_group(make_group(TICKETS["claimed"], actor="x")),
    "put_group again": lambda s: s.put_group(make_group(TICKETS["done"], actor="x")),
    "acknowledge": lambda s: s.acknowledge(["done"]),
    "reissue": lambda s: s.reissue(["done", "acknowledged", "unknown"]),
    "withdraw": lambda s: s.withdraw(["done", "open"]),
    "withdraw_pinned": lambda s: s.withdraw_pinned(),
    "roll_back": lambda s: s.roll_back(["acknowledged"], next_order=4, step=0),
    "fence": lambda s: s.fence("x", "why"),
    "unfence": lambda s: s.unfence("f"),
    "acquire_leadership": lambda s: s.acquire_leadership("here", lease_s=60),
    "renew_leadership": lambda s: s.renew_leadership(lease_s=60),
    "release_leadership": lambda s: s.release_leadership(),
    "announce": lambda s: s.announce(make_announcement(step=3)),
    "put_run_card": lambda s: s.put_run_card(make_run_card(), {}),
    "record_restore": lambda s: s.record_restore(1, 2),
    "raise_anchors": lambda s: s.raise_anchors({"known": [0.5, 2.0], "new": [1.0]}),
    "put_anchors": lambda s: s.put_anchors({"known": [0.5, 2.0], "new": [1.0]}),
}


class Wire:
    """Loses connections: before a script is there, after it was committed, or not at all."""

    def __init__(self, monkeypatch):
        self.losses: list[str] = []
        self.meanwhile = lambda: None
        self.num_sent = 0
        real = postgres_database._run_script

        def send(db, run, script):
            self.num_sent += 1
            loss = self.losses.pop(0) if self.losses else ""
            if loss == "before":
                raise psycopg.OperationalError("the connection is lost")
            result = real(db, run, script)
            if loss == "after":
                meanwhile, self.meanwhile = self.meanwhile, lambda: None
                meanwhile()
                raise psycopg.OperationalError("the connection is lost")
            return result

        monkeypatch.setattr(postgres_database, "_run_script", send)
        monkeypatch.setattr(postgres_database, "_FIRST_PAUSE_S", 0.001)


@pytest.fixture
def wire(monkeypatch):
    return Wire(monkeypatch)


@pytest.fixture
def store(learner, actor):
    store = EachInItsRole(learner, actor)
    fill(store)
    return store


def fill(store):
    store.put_tickets(TICKETS.values())
    store.put_tickets([make_ticket("probe", kind="probe", order=9)])
    for id_ in ("done", "acknowledged"):
        store.put_group(make_group(TICKETS[id_], actor="x"))
    store.acknowledge(["acknowledged"])
    store.claim("w", limit=1, lease_s=60)
    assert [t.id for t in store.claim("x", limit=1, lease_s=60)] == ["claimed"]
    store.release("w", ["open"])
    store.fence("f", "why")
    store.raise_anchors({"known": [1.0]})


def contents(store):
    """All that the run's rows say, but for the names of calls."""
    tickets = (
        """SELECT id, state, actor, attempts, failure, served, only_for FROM tickets WHERE run = :run ORDER BY id"""
    )
    return [
        rows(store, tickets),
        rows(store, "SELECT seq, ticket_id, actor, max_step FROM groups WHERE run = :run ORDER BY seq"),
        rows(store, "SELECT count(*) FROM payloads WHERE run = :run"),
        rows(store, "SELECT ticket_id, actors FROM progress WHERE run = :run ORDER BY ticket_id"),
        rows(store, "SELECT last_seq, reissued, incarnation, holder FROM runs WHERE run = :run"),
        rows(store, "SELECT step FROM announcements WHERE run = :run"),
        rows(store, "SELECT incarnation, step FROM restores WHERE run = :run"),
        rows(store, "SELECT actor FROM fences WHERE run = :run"),
        rows(store, "SELECT count(*) FROM cards WHERE run = :run"),
        rows(store, "SELECT key, ms FROM anchors WHERE run = :run ORDER BY key"),
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("losses", [["before"], ["after"], ["after", "before", "after"]], ids="-".join)
@pytest.mark.parametrize("call", CALLS)
def test_call_that_is_made_again_does_and_answers_what_it_did_once(place, store, wire, call, losses, tmp_path):
    once = place.engine.new_place(tmp_path).open()
    fill(once)
    want = CALLS[call](once)
    wire.losses, wire.num_sent = list(losses), 0
    assert CALLS[call](store) == want
    assert wire.num_sent == (len(losses) + 1 if call != "release_leadership" else 0)
    assert contents(store) == contents(once)
    once.close()


def test_claim_made_again_gets_its_tickets_though_others_claimed_since(store, wire):
    wire.losses = ["after"]
    wire.meanwhile = lambda: store.claim("z", limit=9, lease_s=60)
    assert [t.id for t in store.claim("y", limit=1, lease_s=60)] == ["open"]
    assert store.leased("y") == {"open"} and store.leased("z") == {"spare", "probe"}


def test_group_put_again_is_taken_though_it_was_trained_since(store, wire):
    wire.losses = ["after"]
    wire.meanwhile = lambda: store.acknowledge(["claimed"])
    assert store.put_group(make_group(TICKETS["claimed"], actor="x")) is True
    assert rows(store, "SELECT count(*) FROM payloads WHERE run = :run") == [(1,)]  # that of "done"


def test_group_put_again_is_not_there_twice_though_it_was_dropped_since(store, wire):
    wire.losses = ["after"]
    wire.meanwhile = lambda: store.reissue(["claimed"])
    assert store.put_group(make_group(TICKETS["claimed"], actor="x")) is True
    assert store.counts()["open"] == 4 and [s.group.ticket_id for s in store.read_groups(after_seq=0, limit=9)] == [
        "done"
    ]
    assert store.put_group(make_group(TICKETS["claimed"], actor="x")) is True  # another call: another group


def test_give_up_made_again_leaves_alone_who_claimed_since(store, wire):
    wire.losses = ["after"]
    wire.meanwhile = lambda: store.claim("z", limit=9, lease_s=60)
    store.fail_ticket("claimed", "why", max_attempts=9)
    assert "claimed" in store.leased("z")
    assert rows(store, "SELECT attempts FROM tickets WHERE run = :run AND id = 'claimed'") == [(1,)]


def test_reissue_made_again_leaves_alone_who_claimed_or_put_since(store, wire):
    wire.losses = ["after"]
    wire.meanwhile = lambda: store.put_group(make_group(TICKETS["done"], actor="new"))
    assert store.reissue(["done"]) == 1
    assert [s.group.actor for s in store.read_groups(after_seq=0, limit=9)] == ["new"]


def test_answer_that_comes_late_from_a_lost_connection_changes_nothing(store, wire, place):
    """The server may run what was sent on the lost connection after what was sent on the next."""
    sent = []
    real = postgres_database._run_script

    def remember(db, run, script):
        sent.append(script)
        return real(db, run, script)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres_database, "_run_script", remember)
        assert store.put_group(make_group(TICKETS["claimed"], actor="x")) is True
        claimed = store.claim("y", limit=1, lease_s=60)
        store.fail_ticket("open", "why", max_attempts=9)
    store.reissue(["claimed"])
    before = contents(store)
    for script in sent:
        store.actor._database.write(place.run, dataclasses.replace(script))
    after = contents(store)
    assert [t.id for t in claimed] == ["open"]
    # A claim whose tickets were given up since claims as if it were new: its caller is gone, and its lease will end.
    assert [r for r in after[0] if r[0] != "open"] == [r for r in before[0] if r[0] != "open"]
    assert after[1:] == before[1:]


def test_refused_group_leaves_no_payload(store):
    other = make_group(TICKETS["done"], actor="z", rollouts=(make_rollout(9),) * 2)
    assert store.put_group(other) is False
    with pytest.raises(KeyError):
        store.put_group(make_group(make_ticket("unknown")))
    with pytest.raises(ValueError, match="does not fit"):
        store.put_group(make_group(TICKETS["open"], round=9))
    assert rows(store, "SELECT count(*) FROM payloads WHERE run = :run") == [(1,)]


def test_progress_that_is_inserted_while_its_ticket_is_offered_anew_and_claimed_is_dropped(store, wire, monkeypatch):
    real = postgres_database._execute

    def meanwhile():
        monkeypatch.setattr(postgres_database, "_execute", real)
        store.fence("x", "why")
        store.claim("y", limit=9, lease_s=60)

    def execute(db, step):
        if "lock_run" in step.sql:
            meanwhile()
        return real(db, step)

    monkeypatch.setattr(postgres_database, "_execute", execute)
    store.hand_over("x", make_progress("claimed", actors=("x",)))
    assert "claimed" in store.leased("y")
    assert rows(store, "SELECT count(*) FROM progress WHERE run = :run") == [(0,)]
