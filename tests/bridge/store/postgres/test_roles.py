"""What each role may do, tried in bare SQL: the tables and roles hold it, not this project's clients."""

import contextlib

import psycopg
import pytest

from bridge.store.open import PostgresStore, create_run, find_runs
from bridge.store.postgres.tables_and_roles import FoundRun
from tests.bridge.factories import make_announcement, make_group, make_run_card, make_ticket
from tests.bridge.store.engines import ACTOR, LEARNER

FORBIDDEN = {
    "issue a ticket": """INSERT INTO tickets (run, id, "order", kind, payload, fit, state)
        VALUES (:run, 'mine', 0, 'train', '', '', 'open')""",
    "withdraw a ticket": "DELETE FROM tickets WHERE run = :run",
    "acknowledge": "UPDATE tickets SET state = 'acknowledged' WHERE run = :run AND id = 'done'",
    "acknowledge an open one": "UPDATE tickets SET state = 'acknowledged' WHERE run = :run AND id = 'open'",
    "open a done one": "UPDATE tickets SET state = 'open' WHERE run = :run AND id = 'done'",
    "take a done one": "UPDATE tickets SET state = 'claimed' WHERE run = :run AND id = 'done'",
    "offer a trained one again": "UPDATE tickets SET state = 'open' WHERE run = :run AND id = 'acknowledged'",
    "hand in a trained one": "UPDATE tickets SET state = 'done' WHERE run = :run AND id = 'acknowledged'",
    "fail an open one": "UPDATE tickets SET state = 'failed' WHERE run = :run AND id = 'open'",
    "call it done without a group": "UPDATE tickets SET state = 'done', done_by = 'x' WHERE run = :run AND id = 'open'",
    "invent a state": "UPDATE tickets SET state = 'mine' WHERE run = :run AND id = 'open'",
    "change a prompt": "UPDATE tickets SET payload = '' WHERE run = :run",
    "change the order": """UPDATE tickets SET "order" = -9 WHERE run = :run""",
    "change what fits": "UPDATE tickets SET fit = '' WHERE run = :run",
    "move a ticket to another run": "UPDATE tickets SET run = 'other' WHERE run = :run",
    "reserve a ticket": "UPDATE tickets SET only_for = 'me' WHERE run = :run",
    "give itself more attempts": "UPDATE tickets SET attempts = -9 WHERE run = :run AND id = 'open'",
    "break into a lease": "UPDATE tickets SET actor = 'me' WHERE run = :run AND id = 'claimed'",
    "claim as a fenced actor": """UPDATE tickets SET state = 'claimed', actor = 'f', lease_expires_s = 9
        WHERE run = :run AND id = 'open'""",
    "serve what is another's alone": """UPDATE tickets SET state = 'claimed', actor = 'me', lease_expires_s = 9
        WHERE run = :run AND id = 'alone'""",
    "hand over what it has not claimed": "INSERT INTO progress VALUES (:run, 'open', 'me', '')",
    "hand over what nobody knows": "INSERT INTO progress VALUES (:run, 'mine', 'me', '')",
    "claim as one of several of whom one is fenced": """UPDATE tickets SET state = 'claimed', actor = 'me&f',
        lease_expires_s = 9 WHERE run = :run AND id = 'open'""",
    "drop a group": "DELETE FROM groups WHERE run = :run",
    "change a group": "UPDATE groups SET seq = 99 WHERE run = :run",
    "put a group under a number of its own": """INSERT INTO groups (run, seq, ticket_id, kind, actor, max_step, call)
        VALUES (:run, 99, 'open', 'train', 'me', 0, 'x')""",
    "put a group of nothing": """INSERT INTO groups (run, seq, ticket_id, kind, actor, max_step, call)
        SELECT run, last_seq, 'open', 'train', 'me', 0, 'x' FROM runs WHERE run = :run""",
    "put a group of a trained ticket": """WITH p AS (INSERT INTO payloads VALUES (:run, 'x', '') RETURNING 1)
        INSERT INTO groups (run, seq, ticket_id, kind, actor, max_step, call)
        SELECT run, last_seq, 'acknowledged', 'train', 'me', 0, 'x' FROM runs, p WHERE run = :run""",
    "read groups": "SELECT payload FROM payloads WHERE run = :run",
    "change a payload": "UPDATE payloads SET payload = '' WHERE run = :run",
    "fence": "INSERT INTO fences VALUES (:run, 'x', 'why')",
    "unfence": "DELETE FROM fences WHERE run = :run",
    "announce": "INSERT INTO announcements VALUES (:run, 9, 9, '', '') ON CONFLICT (run) DO UPDATE SET step = 9",
    "change the announcement": "UPDATE announcements SET payload = '' WHERE run = :run",
    "change the card": "UPDATE cards SET payload = '' WHERE run = :run",
    "change a file": "INSERT INTO blobs VALUES (:run, '', '')",
    "lead": "UPDATE runs SET incarnation = 9 WHERE run = :run",
    "resign for the learner": "UPDATE runs SET holder = NULL WHERE run = :run",
    "see where the learner lives": "SELECT holder FROM runs WHERE run = :run",
    "take the run": "UPDATE runs SET owner = current_user WHERE run = :run",
    "open the run to others": "UPDATE runs SET actor_role = 'public' WHERE run = :run",
    "make a run": "INSERT INTO runs (run, name, actor_role) VALUES ('mine', '', current_user)",
    "end a run": "DELETE FROM runs WHERE run = :run",
    "count numbers up": "UPDATE runs SET last_seq = last_seq + 2 WHERE run = :run",
    "count numbers down": "UPDATE runs SET last_seq = last_seq - 1 WHERE run = :run",
    "set the counter of reissues": "UPDATE runs SET reissued = 99 WHERE run = :run",
    "record a restore": "INSERT INTO restores VALUES (:run, 9, 9)",
    "beat for the learner": "INSERT INTO heartbeats VALUES (:run, 'learner', '', 0)",
    "silence the learner": "DELETE FROM heartbeats WHERE run = :run",
    "make an anchor smaller": "UPDATE anchors SET ms = '10,2999' WHERE run = :run",
    "make an anchor smaller by handing one in": """INSERT INTO anchors VALUES (:run, 'task', '1')
        ON CONFLICT (run, key) DO UPDATE SET ms = excluded.ms""",
    "leave out a case of an anchor": "UPDATE anchors SET ms = '5000' WHERE run = :run",
    "forget an anchor": "DELETE FROM anchors WHERE run = :run",
    "give an anchor to another task": "UPDATE anchors SET key = 'other' WHERE run = :run",
    "give an anchor to another run": "UPDATE anchors SET run = 'other' WHERE run = :run",
    "put an anchor into another run": "INSERT INTO anchors VALUES ('other', 'task', '1')",
    "put an anchor of a long key": "INSERT INTO anchors VALUES (:run, repeat('k', 65), '1')",
    "put an anchor of no key": "INSERT INTO anchors VALUES (:run, '', '1')",
    "put an anchor of nothing": "INSERT INTO anchors VALUES (:run, 'k', '')",
    "put an anchor of words": "INSERT INTO anchors VALUES (:run, 'k', '1,x')",
    "put an anchor below 0": "INSERT INTO anchors VALUES (:run, 'k', '-1')",
    "put an anchor of many digits": "INSERT INTO anchors VALUES (:run, 'k', '100000000')",
    "put an anchor of many cases": "INSERT INTO anchors VALUES (:run, 'k', repeat('1,', 4096) || '1')",
    "put an anchor of megabytes": "INSERT INTO anchors VALUES (:run, 'k', repeat('1', 1000000))",
    "change the clock": "CREATE OR REPLACE FUNCTION now_s() RETURNS float8 LANGUAGE sql RETURN 0",
    "drop a rule": "DROP TRIGGER check_ticket ON tickets",
    "see all rows": "ALTER TABLE tickets DISABLE ROW LEVEL SECURITY",
    "empty a table": "TRUNCATE tickets",
    "make tables": "CREATE TABLE sluice.mine (x int)",
    "become the learner": f"SET ROLE {LEARNER}",
    "become the owner": "SET ROLE postgres",
    "change the format": "UPDATE format SET number = 2",
}


@pytest.fixture
def run(place, learner):
    tickets = {i: make_ticket(i, order=n) for n, i in enumerate(("claimed", "open", "done", "acknowledged"))}
    learner.put_tickets(tickets.values())
    learner.put_tickets([make_ticket("alone", kind="probe")], only_for="x")
    for id_ in ("done", "acknowledged"):
        learner.put_group(make_group(tickets[id_]))
    learner.acknowledge(["acknowledged"])
    learner.claim("y", limit=1, lease_s=60)
    learner.fence("f", "why")
    learner.announce(make_announcement())
    learner.put_run_card(make_run_card(), {})
    learner.put_anchors({"task": [0.01, 3.0]})
    return place.run


def dump(place, run):
    """Every row of a run, as the superuser sees it."""
    with psycopg.connect(place.engine.url_of("postgres")) as db:
        names = [n for (n,) in db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'sluice'").fetchall()]
        return {
            n: db.execute(f"SELECT * FROM sluice.{n} t WHERE t.run = %s ORDER BY t::text".encode(), (run,)).fetchall()
            for n in sorted(names)
            if n != "format"
        }


@pytest.mark.heavy
@pytest.mark.parametrize("what", FORBIDDEN)
def test_actors_role_is_refused_what_only_the_learner_may(place, run, as_actor, what):
    before = dump(place, run)
    with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.CheckViolation)):
        as_actor.execute(FORBIDDEN[what].replace(":run", f"'{run}'"))
    assert dump(place, run) == before


def test_actor_sees_no_row_of_a_run_that_is_not_for_its_role(place, run, as_actor, postgres):
    postgres.create_role("somebody")
    create_run(place.engine.url_of(LEARNER), run="foreign", name="foreign", actor_role="somebody")
    with contextlib.closing(PostgresStore(place.engine.url_of(LEARNER), run="foreign")) as foreign:
        foreign.put_tickets([make_ticket("secret")])
        foreign.announce(make_announcement())
        foreign.fence("x", "why")
        foreign.put_run_card(make_run_card(), {})
        foreign.put_anchors({"secret": [1.0]})
        for table in ("runs", "tickets", "fences", "announcements", "cards", "anchors"):
            assert as_actor.execute(f"SELECT run FROM {table} WHERE run = 'foreign'").fetchall() == []
            assert as_actor.execute(f"SELECT run FROM {table} WHERE run = '{run}'").fetchall() != []
        took = "UPDATE tickets SET state = 'claimed', actor = 'x' WHERE id = 'secret' RETURNING run"
        assert as_actor.execute(took).fetchall() == []
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            as_actor.execute("INSERT INTO payloads VALUES ('foreign', 'x', '')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            as_actor.execute("INSERT INTO heartbeats VALUES ('foreign', 'x', '', 0)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            as_actor.execute("INSERT INTO anchors VALUES ('foreign', 'secret', '2000')")
        assert as_actor.execute("UPDATE anchors SET ms = '2000' WHERE key = 'secret' RETURNING run").fetchall() == []
        with pytest.raises(psycopg.Error, match="no run foreign"):
            as_actor.execute("SELECT lock_run('foreign', NULL, '5s')")
    with pytest.raises(ValueError, match="no run foreign, or this role may not serve it"):
        PostgresStore(place.engine.url_of(ACTOR), run="foreign")
    assert find_runs(place.engine.url_of(ACTOR), "foreign") == []
    assert find_runs(place.engine.url_of(LEARNER), "foreign") == [FoundRun("foreign", None)]


def test_run_that_goes_on_with_another_actor_role_is_served_by_that_one_alone(place):
    learner_url, actor_url = place.engine.url_of(LEARNER), place.engine.url_of(ACTOR)
    for actor_role, found in ((ACTOR, ["moved"]), ("somebody", []), (ACTOR, ["moved"])):
        create_run(learner_url, run="moved", name="moved", actor_role=actor_role)
        assert [r.run for r in find_runs(actor_url, "moved")] == found


def test_learner_leads_only_runs_that_its_role_began(place, run, postgres):
    postgres.create_role("other_learner")
    place.engine.admin.execute("GRANT sluice_learner TO other_learner")
    url = place.engine.url_of("other_learner")
    with pytest.raises(ValueError, match="belongs to another role"):
        create_run(url, run=run, name="mine now", actor_role=ACTOR)
    with pytest.raises(ValueError, match=f"no run {run}"):
        PostgresStore(url, run=run)
    before = dump(place, run)
    with psycopg.connect(url, autocommit=True) as db:
        for table in ("tickets", "groups", "payloads", "runs", "fences"):
            assert db.execute(f"DELETE FROM sluice.{table} WHERE run = %s", (run,)).rowcount == 0
    assert dump(place, run) == before


def test_superuser_whom_no_rule_holds_touches_one_run_only(place, run, tmp_path):
    """Rules don't hold a superuser; that every statement names its run does."""
    other = place.engine.new_place(tmp_path)
    with contextlib.closing(other.open()) as store:
        store.put_tickets([make_ticket(i) for i in ("open", "done", "e")])
        store.put_group(make_group(make_ticket("done")))
        store.put_anchors({"task": [1.0]})
    before = dump(place, other.run)
    with contextlib.closing(PostgresStore(place.engine.url_of("postgres"), run=run)) as store:
        store.claim("x", limit=9, lease_s=60)
        store.put_group(make_group(make_ticket("open", order=1), actor="x"))
        store.acknowledge(["done"])
        store.reissue(["open", "done"])
        store.fence("a", "why")
        store.roll_back([], next_order=0, step=0)
        store.withdraw(["open", "done", "e"])
        store.withdraw_pinned()
        store.put_anchors({"task": [9.0]})
        store.raise_anchors({"task": [9.5]})
        assert store.acquire_leadership("here", lease_s=9) == 0
    assert dump(place, other.run) == before


def test_actors_on_one_run_may_not_hand_in_for_an_actor_that_is_fenced(actor, learner):
    learner.put_tickets([make_ticket("a")])
    learner.fence("bad", "why")
    with pytest.raises(RuntimeError, match="fenced"):
        actor.put_group(make_group(make_ticket("a"), actor="bad"))
    assert learner.read_groups(after_seq=0, limit=9) == []


@pytest.mark.parametrize("act", [lambda s: s.put_tickets([make_ticket("a")]), lambda s: s.fence("x", "why")])
def test_actors_store_that_asks_for_what_is_the_learners_gets_one_clear_line(actor, act):
    with pytest.raises(PermissionError, match="permission denied"):
        act(actor)


def test_actor_that_raises_anchors_does_not_wait_for_the_runs_writers(place, actor):
    with psycopg.connect(place.engine.url_of(LEARNER, options="-csearch_path=sluice")) as writer:
        writer.execute("SELECT lock_run(%s, NULL, '60s')", (place.run,))
        actor.raise_anchors({"a": [1.0]})
        assert actor.anchors(["a"]) == {"a": (1.0,)}
