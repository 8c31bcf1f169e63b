"""What was sent twice or too late, or was refused, leaves nothing (each lost call: integration/test_store_cuts.py)."""

import concurrent.futures
import dataclasses

import psycopg
import pytest

from bridge.store.postgres import postgres_database
from bridge.store.sql.database import Transaction
from tests.bridge.factories import make_group, make_progress, make_rollout, make_ticket
from tests.bridge.store.engines import LEARNER, EachInItsRole, rows
from tests.integration.support.processes import wait_until

TICKETS = {i: make_ticket(i, order=n) for n, i in enumerate(("open", "claimed", "done", "acknowledged", "spare"))}


@pytest.fixture
def store(learner, actor):
    store = EachInItsRole(learner, actor)
    store.put_tickets(TICKETS.values())
    store.put_tickets([make_ticket("probe", kind="probe", order=9)])
    for id_ in ("done", "acknowledged"):
        store.put_group(make_group(TICKETS[id_], actor="x"))
    store.acknowledge(["acknowledged"])
    store.claim("w", limit=1, lease_s=60)
    assert [t.id for t in store.claim("x", limit=1, lease_s=60)] == ["claimed"]
    store.release("w", ["open"])
    return store


@pytest.fixture
def sent(store, monkeypatch):
    """What each call after the fixture's own sends."""
    scripts: list[Transaction] = []
    real = postgres_database._run_script

    def remember(db, run, script):
        scripts.append(script)
        return real(db, run, script)

    monkeypatch.setattr(postgres_database, "_run_script", remember)
    return scripts


def contents(store):
    """All that the run's rows say of tickets and groups, but for the names of calls."""
    return [
        rows(store, "SELECT id, state, actor, attempts, failure, served FROM tickets WHERE run = :run ORDER BY id"),
        rows(store, "SELECT seq, ticket_id, actor, max_step FROM groups WHERE run = :run ORDER BY seq"),
        rows(store, "SELECT count(*) FROM payloads WHERE run = :run"),
        rows(store, "SELECT ticket_id, actors FROM progress WHERE run = :run ORDER BY ticket_id"),
        rows(store, "SELECT last_seq, reissued FROM runs WHERE run = :run"),
    ]


def test_progress_that_is_handed_over_again_is_there_once(store, sent, place):
    store.hand_over("x", make_progress("claimed", actors=("x",)))
    (script,) = sent
    before = contents(store)
    assert before[3] == [("claimed", "x")]
    store.actor._database.write(place.run, dataclasses.replace(script))
    assert contents(store) == before


def test_progress_that_is_handed_over_again_while_its_first_transaction_runs_is_there_once(store, sent, place):
    """As after a connection that is cut while the server works: the repeated insertion waits for the first one."""

    def num_waiting() -> int:
        backends = "pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return place.engine.admin.execute(f"SELECT count(*) FROM {backends}").fetchone()[0]

    with (
        concurrent.futures.ThreadPoolExecutor() as threads,
        psycopg.connect(place.engine.url_of(LEARNER)) as leader,
    ):
        leader.execute("SELECT FROM sluice.runs WHERE run = %s FOR NO KEY UPDATE", (place.run,))
        first = threads.submit(store.hand_over, "x", make_progress("claimed", actors=("x",)))
        wait_until(lambda: num_waiting() == 1, "the first one waits for the run's lock")
        again = threads.submit(store.actor._database.write, place.run, dataclasses.replace(sent[0]))
        wait_until(lambda: num_waiting() == 2, "the second one waits for the first")
        leader.rollback()
        first.result(timeout=30)
        again.result(timeout=30)
    assert rows(store, "SELECT ticket_id, actors FROM progress WHERE run = :run") == [("claimed", "x")]
    assert store.leased("x") == set()


def test_answer_that_comes_late_from_a_lost_connection_changes_nothing(store, sent, place):
    """The server may run what was sent on the lost connection after what was sent on the next."""
    assert store.put_group(make_group(TICKETS["claimed"], actor="x")) is True
    claimed = store.claim("y", limit=1, lease_s=60)
    store.fail_ticket("open", "why", max_attempts=9)
    scripts = list(sent)
    store.reissue(["claimed"])
    before = contents(store)
    for script in scripts:
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


def test_progress_that_is_inserted_while_its_ticket_is_offered_anew_and_claimed_is_dropped(store, monkeypatch):
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
