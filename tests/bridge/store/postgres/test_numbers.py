"""A reader that goes on from the last number it saw misses nothing, in whatever order writers commit."""

import contextlib
import threading

import psycopg
import pytest

from bridge.store.open import SqlStore
from bridge.store.postgres import postgres_database
from bridge.store.postgres.postgres_database import PostgresDatabase
from bridge.store.sql.database import Statement, Transaction
from tests.bridge.factories import make_group, make_ticket
from tests.integration.support.processes import wait_until


class Held(PostgresDatabase):
    """Its transactions stay open in front of COMMIT until they are let go; as SQL may be given in another way."""

    def __init__(self, url, *, alter=lambda script: script):
        super().__init__(url, retry_s=0)
        self.is_open, self.may_commit, self.alter = threading.Event(), threading.Event(), alter

    def write(self, run, script):
        script = self.alter(script)
        with self._connections.borrow() as db:
            db.execute("BEGIN")
            for step in script.before_lock:
                postgres_database._execute(db, step)
            if script.locks:
                postgres_database._execute(
                    db, Statement(postgres_database._LOCK.sql, {"run": run, "incarnation": None, "at_most": "60s"})
                )
            cursors = [postgres_database._execute(db, step) for step in script.steps]
            rows = [c.fetchall() if c.description else [] for c in cursors]
            self.is_open.set()
            self.may_commit.wait()
            db.execute("COMMIT")
        return rows


def numbered_by_a_sequence(script: Transaction) -> Transaction:
    """What one would write first: no lock, and numbers as PostgreSQL's sequences give them."""
    steps = [
        Statement(s.sql.replace("SELECT run, last_seq,", "SELECT run, nextval('public.naive'),"), s.params)
        for s in script.steps
        if "last_seq + 1" not in s.sql
    ]
    return Transaction(steps=steps, before_lock=script.before_lock, locks=False)


def read_while_the_first_commits_last(url, run, learner, *, alter):
    """Ids that a reader gets, of two groups of which the one that is numbered first is committed last."""
    tickets = [make_ticket(i) for i in ("first", "second")]
    learner.put_tickets(tickets)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(Held(url, alter=alter))) for _ in tickets)
        stores = [SqlStore(held, run=run) for held in (first, second)]
        puts = zip(stores, map(make_group, tickets), strict=True)
        threads = [threading.Thread(target=store.put_group, args=(group,)) for store, group in puts]
        threads[0].start()
        first.is_open.wait()
        second.may_commit.set()
        threads[1].start()
        wait_until(lambda: not threads[1].is_alive() or is_waiting(url), "the second to commit, or to wait its turn")
        read = learner.read_groups(after_seq=0, limit=9)
        first.may_commit.set()
        for thread in threads:
            thread.join()
        read += learner.read_groups(after_seq=read[-1].seq if read else 0, limit=9)
    return [s.group.ticket_id for s in read]


def is_waiting(url):
    with psycopg.connect(url) as db:
        return db.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


def test_group_that_is_numbered_first_and_committed_last_is_read(place, learner):
    url = place.engine.url_of("postgres")
    got = read_while_the_first_commits_last(url, place.run, learner, alter=lambda script: script)
    assert got == ["first", "second"]


def test_the_same_without_the_lock_would_lose_a_group_for_ever(place, learner):
    """That the test above can see it."""
    url = place.engine.url_of("postgres")
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE SEQUENCE IF NOT EXISTS public.naive")
        db.execute("GRANT USAGE ON SEQUENCE public.naive TO public")
    got = read_while_the_first_commits_last(url, place.run, learner, alter=numbered_by_a_sequence)
    assert got == ["second"]


def test_claims_take_turns(place, learner):
    """The second sees what the first took, so two of them can't make the frontier wider than it is."""
    url = place.engine.url_of("postgres")
    learner.put_tickets([make_ticket(f"t{n}", order=n) for n in range(4)])
    got = []
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(Held(url))) for _ in range(2))
        stores = [SqlStore(held, run=place.run) for held in (first, second)]
        threads = [
            threading.Thread(target=lambda s=s, n=n: got.extend(s.claim(n, limit=9, lease_s=60, width=2)))
            for s, n in zip(stores, "xy", strict=True)
        ]
        second.may_commit.set()
        threads[0].start()
        first.is_open.wait()
        threads[1].start()
        wait_until(lambda: not threads[1].is_alive() or is_waiting(url), "the second to have claimed, or to wait")
        first.may_commit.set()
        for thread in threads:
            thread.join()
    assert [t.id for t in got] == ["t0", "t1"]


def test_lock_that_a_stopped_client_holds_is_let_go_by_the_server(place, learner, as_actor):
    if as_actor.info.server_version < 170000:
        pytest.skip("transaction_timeout needs PostgreSQL 17")
    as_actor.execute("BEGIN")
    as_actor.execute("SELECT lock_run(%s, NULL, '200ms')", (place.run,))
    assert learner.put_tickets([make_ticket("a")]) == 1  # once the server has ended the other's transaction
    with pytest.raises(psycopg.errors.TransactionTimeout):
        as_actor.execute("SELECT 1")


def test_large_payload_is_sent_before_the_lock_is_taken(place, learner, as_actor):
    """A group on its slow way holds up nobody: all of it is there before the run's turn is asked for."""
    learner.put_tickets([make_ticket("a"), make_ticket("b")])
    as_actor.execute("BEGIN")
    as_actor.execute("INSERT INTO payloads (run, call, payload) VALUES (%s, 'x', %s)", (place.run, b"\0" * 9))
    assert learner.put_group(make_group(make_ticket("b"))) is True  # would wait for ever
    as_actor.execute("ROLLBACK")
