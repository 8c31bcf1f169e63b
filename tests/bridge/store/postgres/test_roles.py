"""What each role may do, tried in bare SQL: the tables and roles hold it, not this project's clients."""

import contextlib

import blake3
import psycopg
import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.store.open import PostgresStore, create_run, find_runs
from bridge.store.postgres.tables_and_roles import FoundRun
from bridge.store.store_types import FencedError
from tests.bridge.factories import make_announcement, make_group, make_progress, make_run_card, make_ticket
from tests.bridge.store.engines import ACTOR, LEARNER

FORBIDDEN = {
    "issue a ticket": """INSERT INTO tickets (run, id, "order", kind, payload, fit, state)
        VALUES (:run, 'mine', 0, 'train', '', '', 'open')""",
    "withdraw a ticket": "DELETE FROM tickets WHERE run = :run",
    "acknowledge": "UPDATE tickets SET state = 'acknowledged' WHERE run = :run AND id = 'done'",
    "acknowledge an open one": "UPDATE tickets SET state = 'acknowledged' WHERE run = :run AND id = 'open'",
    "open a done one": "UPDATE tickets SET state = 'open' WHERE run = :run AND id = 'done'",
    "take a done one": """UPDATE tickets SET state = 'claimed', lease_expires_s = 9
        WHERE run = :run AND id = 'done'""",
    "offer a trained one again": "UPDATE tickets SET state = 'open' WHERE run = :run AND id = 'acknowledged'",
    "hand in a trained one": "UPDATE tickets SET state = 'done' WHERE run = :run AND id = 'acknowledged'",
    "fail an open one": "UPDATE tickets SET state = 'failed' WHERE run = :run AND id = 'open'",
    "call it done without a group": "UPDATE tickets SET state = 'done', done_by = 'x' WHERE run = :run AND id = 'open'",
    "invent a state": "UPDATE tickets SET state = 'mine' WHERE run = :run AND id = 'open'",
    "change a prompt": "UPDATE tickets SET payload = '' WHERE run = :run AND id = 'claimed'",
    "change the order": """UPDATE tickets SET "order" = -9 WHERE run = :run AND id = 'claimed'""",
    "change what fits": "UPDATE tickets SET fit = '' WHERE run = :run AND id = 'claimed'",
    "move a ticket to another run": "UPDATE tickets SET run = 'other' WHERE run = :run AND id = 'claimed'",
    "reserve a ticket": "UPDATE tickets SET only_for = 'y' WHERE run = :run AND id = 'claimed'",
    "give itself more attempts": "UPDATE tickets SET attempts = -9 WHERE run = :run AND id = 'claimed'",
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
    "read groups": "SELECT payload FROM payloads WHERE run = :run",
    "change a payload": "UPDATE payloads SET payload = '' WHERE run = :run",
    "fence": "INSERT INTO fences VALUES (:run, 'x', 'why')",
    "unfence": "DELETE FROM fences WHERE run = :run",
    "announce": "INSERT INTO announcements VALUES (:run, 9, 9, '', '') ON CONFLICT (run) DO UPDATE SET step = 9",
    "announce first": "INSERT INTO announcements VALUES ('mine', 9, 9, '', '')",
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
    "silence the learner": "DELETE FROM heartbeats WHERE run = :run",
    "empty a table": "TRUNCATE tickets",
    "change the format": "UPDATE format SET number = 2",
    "count engines": "UPDATE serving SET sizes = '1:1000000' WHERE run = :run",
    "invent engines": "INSERT INTO serving VALUES ('mine', 0, '')",
    "forget engines": "DELETE FROM serving WHERE run = :run",
    "read restores": "SELECT * FROM restores",
    "end the run": "UPDATE runs SET finished_step = 1 WHERE run = :run",
    "change a file that is there": "UPDATE blobs SET content = '' WHERE run = :run",
    "rename an actor": "UPDATE groups SET actor = 'me' WHERE run = :run",
}
RULES = {
    "change the clock": "CREATE OR REPLACE FUNCTION now_s() RETURNS float8 LANGUAGE sql RETURN 0",
    "drop a rule": "DROP TRIGGER check_ticket ON tickets",
    "see all rows": "ALTER TABLE tickets DISABLE ROW LEVEL SECURITY",
    "make tables": "CREATE TABLE sluice.mine (x int)",
    "become the learner": f"SET ROLE {LEARNER}",
    "become the owner": "SET ROLE postgres",
    "become the administrator": "SET SESSION AUTHORIZATION postgres",
    "give itself the learner's role": f"GRANT sluice_learner TO {ACTOR}",
    "become a superuser": f"ALTER ROLE {ACTOR} SUPERUSER",
    "change the learner's password": f"ALTER ROLE {LEARNER} PASSWORD 'x'",
    "own all runs": "CREATE OR REPLACE FUNCTION owns(this_run text) RETURNS boolean LANGUAGE sql RETURN true",
    "drop a rule's function": "DROP FUNCTION check_ticket() CASCADE",
    "turn rules off": "ALTER TABLE tickets DISABLE TRIGGER ALL",
    "drop a policy": "DROP POLICY learner ON tickets",
    "make a policy": "CREATE POLICY mine ON tickets USING (true)",
    "leave rules out": "SET session_replication_role = replica",
    "make public tables": "CREATE TABLE public.mine (x int)",
    "make a rule": "CREATE TRIGGER mine BEFORE UPDATE ON tickets FOR EACH ROW EXECUTE FUNCTION check_run()",
}
OUTSIDE = {
    "start a program": "COPY (SELECT 1) TO PROGRAM 'id'",
    "copy a file": "COPY format FROM '/etc/hostname'",
    "read a file": "SELECT pg_read_file('/etc/passwd')",
    "list a folder": "SELECT pg_ls_dir('.')",
    "read passwords": "SELECT rolpassword FROM pg_authid",
    "end the learner": f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{LEARNER}'",
    "stop the learner": f"SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE usename = '{LEARNER}'",
    "change the server": "ALTER SYSTEM SET fsync = off",
}
CLAIM = "UPDATE tickets SET state = 'claimed', actor = {}, lease_expires_s = {} WHERE run = :run AND id = 'open'"
CLAIMS = {
    "break into a lease": "UPDATE tickets SET actor = 'me' WHERE run = :run AND id = 'claimed'",
    "claim for nobody": CLAIM.format("NULL", "now_s() + 1"),
    **{f"claim until {t}": CLAIM.format("'me'", t) for t in ("NULL", "'NaN'", "'infinity'", "now_s() + 86401")},
}
SIZES = {
    "put a payload over 64 MiB": "INSERT INTO payloads VALUES (:run, 'x', convert_to(repeat('x', 67108865), 'UTF8'))",
    "put a call of a long name": "INSERT INTO payloads VALUES (:run, repeat('x', 65), '')",
    "put an object of a long name": "INSERT INTO payloads VALUES (:run, 'x', '', repeat('x', 129))",
    "fail for a long reason": """UPDATE tickets SET state = 'failed', failure = repeat('x', 4097)
        WHERE run = :run AND id = 'claimed'""",
    "claim under a long name": "UPDATE tickets SET claim = repeat('x', 65) WHERE run = :run AND id = 'claimed'",
    "claim for a long name": CLAIM.format("repeat('x', 4097)", "now_s() + 1"),
    "beat with a large payload": """INSERT INTO heartbeats
        VALUES (:run, 'x', convert_to(repeat('x', 16385), 'UTF8'), now_s())""",
    "beat under a long name": "INSERT INTO heartbeats VALUES (:run, repeat('x', 1025), '', now_s())",
    "beat in the future": "INSERT INTO heartbeats VALUES (:run, 'x', '', now_s() + 1e9)",
    "put an anchor of a long key": "INSERT INTO anchors VALUES (:run, repeat('k', 65), '1')",
    "put an anchor of no key": "INSERT INTO anchors VALUES (:run, '', '1')",
    "put an anchor of nothing": "INSERT INTO anchors VALUES (:run, 'k', '')",
    "put an anchor of words": "INSERT INTO anchors VALUES (:run, 'k', '1,x')",
    "put an anchor below 0": "INSERT INTO anchors VALUES (:run, 'k', '-1')",
    "put an anchor of many digits": "INSERT INTO anchors VALUES (:run, 'k', '100000000')",
    "put an anchor of many cases": "INSERT INTO anchors VALUES (:run, 'k', repeat('1,', 4096) || '1')",
    "put an anchor of megabytes": "INSERT INTO anchors VALUES (:run, 'k', repeat('1', 1000000))",
}
ANCHORS = {
    "make an anchor smaller": "UPDATE anchors SET ms = '10,2999' WHERE run = :run",
    "make an anchor smaller by handing one in": """INSERT INTO anchors VALUES (:run, 'task', '1')
        ON CONFLICT (run, key) DO UPDATE SET ms = excluded.ms""",
    "leave out a case of an anchor": "UPDATE anchors SET ms = '5000' WHERE run = :run",
    "forget an anchor": "DELETE FROM anchors WHERE run = :run",
    "give an anchor to another task": "UPDATE anchors SET key = 'other' WHERE run = :run",
    "give an anchor to another run": "UPDATE anchors SET run = 'other' WHERE run = :run",
}
GROUP = """INSERT INTO groups SELECT run, {}, '{}', 'train', 'me', 0, 'x' FROM runs WHERE run = :run;"""
PAYLOAD, NEXT = (
    "INSERT INTO payloads VALUES (:run, 'x', '');",
    "UPDATE runs SET last_seq = last_seq + 1 WHERE run = :run;",
)
DONE = """UPDATE tickets SET state = 'done', actor = 'me', lease_expires_s = NULL, done_by = 'x'
    WHERE run = :run AND id = 'open'"""
GROUPS = {
    "put a group under a number of its own": PAYLOAD + GROUP.format(99, "open") + DONE,
    "put a group of nothing": NEXT + GROUP.format("last_seq", "open") + DONE,
    "put a group of a trained ticket": PAYLOAD + NEXT + GROUP.format("last_seq", "acknowledged"),
    "keep other groups of a ticket out": PAYLOAD + NEXT + GROUP.format("last_seq", "open"),
}
UNTOUCHED = {
    "delete the payload of a group": "DELETE FROM payloads WHERE run = :run",
    "change the learner's heartbeat": "UPDATE heartbeats SET payload = '' WHERE run = :run AND process = 'learner'",
    "watch the learner": f"""SELECT FROM pg_stat_activity WHERE usename = '{LEARNER}'
        AND query <> '<insufficient privilege>'""",
}


def fill(store):
    """Puts a row into every table that an actor reads."""
    store.put_tickets([make_ticket("handed", order=9)])
    store.claim("y", limit=1, lease_s=60)
    store.hand_over("y", make_progress("handed"))
    tickets = {i: make_ticket(i, order=n) for n, i in enumerate(("claimed", "open", "done", "acknowledged"))}
    store.put_tickets(tickets.values())
    store.put_tickets([make_ticket("alone", kind="probe")], only_for="x")
    for id_ in ("done", "acknowledged"):
        store.put_group(make_group(tickets[id_]))
    store.acknowledge(["acknowledged"])
    store.claim("y", limit=1, lease_s=60)
    store.heartbeat(Heartbeat(process="learner", role="learner", pid=1, time_s=0.0))
    store.fence("f", "why")
    store.announce(make_announcement())
    files = {blake3.blake3(b"1").hexdigest(): b"1"}
    store.put_run_card(make_run_card(files=files), files)
    store.put_anchors({"task": [0.01, 3.0]})


@pytest.fixture
def run(place, learner):
    fill(learner)
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


def check_refused(place, run, as_actor, statement):
    """Fails for want of rights, of more than row-level security, and changes nothing."""
    before = dump(place, run)
    refused = "permission denied|only the run's learner may|must be owner|violates check constraint"
    with pytest.raises(psycopg.Error, match=refused):
        as_actor.execute(statement.replace(":run", f"'{run}'"))
    assert dump(place, run) == before


@pytest.mark.heavy
@pytest.mark.parametrize("what", FORBIDDEN)
def test_actors_role_is_refused_what_only_the_learner_may(place, run, as_actor, what):
    """Its SQL issues, acknowledges, withdraws, fences, announces, deletes groups or leads | permission denied"""
    check_refused(place, run, as_actor, FORBIDDEN[what])


@pytest.mark.heavy
@pytest.mark.parametrize("what", RULES)
def test_actors_role_may_not_become_another_or_change_the_rules(place, run, as_actor, what):
    """It takes another role, alters functions, triggers or policies, or turns them off | permission denied"""
    check_refused(place, run, as_actor, RULES[what])


@pytest.mark.parametrize("what", OUTSIDE)
def test_actors_role_may_not_reach_out_of_the_database(place, run, as_actor, what):
    """It reads the server's files, starts programs, ends or watches the learner's session | permission denied"""
    check_refused(place, run, as_actor, OUTSIDE[what])


@pytest.mark.parametrize("what", CLAIMS)
def test_actors_role_may_not_claim_for_ever_for_nobody_or_over_anothers_lease(place, run, as_actor, what):
    """It leases a ticket for ever, to nobody, or takes one whose lease runs | refused: a day at most, and by a name"""
    check_refused(place, run, as_actor, CLAIMS[what])


@pytest.mark.heavy
@pytest.mark.parametrize("what", SIZES)
def test_actors_role_may_not_store_what_would_fill_the_learners_memory(place, run, as_actor, what):
    """It stores a payload over 64 MiB, a reason or name of megabytes, thousands of processes | a constraint refuses"""
    check_refused(place, run, as_actor, SIZES[what])


def test_actors_role_beats_for_no_more_than_4096_processes(place, run, as_actor):
    beats = "INSERT INTO sluice.heartbeats SELECT %s, 'p' || i, '', 1000 FROM generate_series(2, 4096) i"
    place.engine.admin.execute(beats, (run,))  # and the learner's
    check_refused(place, run, as_actor, "INSERT INTO heartbeats VALUES (:run, 'one more', '', now_s())")
    assert as_actor.execute("UPDATE heartbeats SET payload = 'x' WHERE process = 'p2' RETURNING 1").fetchall() == [(1,)]


@pytest.mark.heavy
@pytest.mark.parametrize("what", ANCHORS)
def test_actors_role_may_not_make_an_anchor_smaller(place, run, as_actor, what):
    """It makes an anchor smaller, so that correct answers end as too slow, or forgets one | refused: they only go up"""
    check_refused(place, run, as_actor, ANCHORS[what])


@pytest.mark.parametrize("what", GROUPS)
def test_actors_role_may_not_hand_in_a_group_outside_the_rules(place, run, as_actor, what):
    """It numbers groups itself, hands one in twice, or one that keeps the honest one out | refused"""
    check_refused(place, run, as_actor, GROUPS[what])


@pytest.mark.parametrize("what", UNTOUCHED)
def test_actors_role_touches_no_row_that_it_may_not(place, run, as_actor, what):
    before = dump(place, run)
    assert as_actor.execute(UNTOUCHED[what].replace(":run", f"'{run}'")).rowcount == 0
    assert dump(place, run) == before


def test_actors_role_may_not_beat_for_the_learner(place, as_actor):
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        as_actor.execute(f"INSERT INTO heartbeats VALUES ('{place.run}', 'learner', '', now_s())")


def test_actor_sees_no_row_of_a_run_that_is_not_for_its_role(place, run, as_actor, postgres):
    """An actor's role reads another run's tickets, groups, weights' announcements or files | it sees no row of it"""
    postgres.create_role("somebody")
    create_run(place.engine.url_of(LEARNER), run="foreign", name="foreign", actor_role="somebody")
    with contextlib.closing(PostgresStore(place.engine.url_of(LEARNER), run="foreign")) as foreign:
        fill(foreign)
        tables = [table for table in dump(place, run) if table not in ("restores", "dropped_objects", "serving")]
        for table in tables:
            assert dump(place, "foreign")[table] != []
            assert as_actor.execute(f"SELECT run FROM {table} WHERE run = 'foreign'").fetchall() == []
            assert as_actor.execute(f"SELECT run FROM {table} WHERE run = '{run}'").fetchall() != []
        for change in (
            "UPDATE tickets SET state = 'claimed', actor = 'x' WHERE run = 'foreign'",
            "UPDATE anchors SET ms = '9000' WHERE run = 'foreign'",
            "UPDATE runs SET last_seq = last_seq + 1 WHERE run = 'foreign'",
            "UPDATE progress SET payload = '' WHERE run = 'foreign'",
            "DELETE FROM progress WHERE run = 'foreign'",
            "UPDATE heartbeats SET payload = '' WHERE run = 'foreign'",
        ):
            assert as_actor.execute(change).rowcount == 0
        for change in (
            "INSERT INTO payloads VALUES ('foreign', 'x', '')",
            "INSERT INTO heartbeats VALUES ('foreign', 'x', '', now_s())",
            "INSERT INTO anchors VALUES ('foreign', 'x', '2000')",
            "SET row_security = off; SELECT run FROM tickets",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
                as_actor.execute(change)
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


def test_actors_on_one_run_may_not_claim_or_hand_in_for_an_actor_that_is_fenced(actor, learner):
    """A fenced actor's claims and groups, by our calls or by SQL | FencedError; refused"""
    learner.put_tickets([make_ticket("a")])
    learner.fence("bad", "why")
    with pytest.raises(FencedError, match="actor bad is fenced: why"):
        actor.claim("bad", limit=1, lease_s=60)
    with pytest.raises(FencedError, match="bad is fenced"):
        actor.put_group(make_group(make_ticket("a"), actor="bad"))
    assert learner.read_groups(after_seq=0, limit=9) == []


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda s: s.put_tickets([make_ticket("a")]), "permission denied"),
        (lambda s: s.fence("x", "why"), "permission denied"),
        (lambda s: s.heartbeat(Heartbeat(process="learner", role="learner", pid=2, time_s=0.0)), "row-level security"),
    ],
)
def test_actors_store_that_asks_for_what_is_the_learners_gets_one_clear_line(actor, run, act, said):
    """An actor's role makes a call that only the learner may (lead, issue, acknowledge, fence...) | PermissionError"""
    with pytest.raises(PermissionError, match=f"{ACTOR}.*{said}"):
        act(actor)


def test_actor_that_raises_anchors_does_not_wait_for_the_runs_writers(place, actor):
    with psycopg.connect(place.engine.url_of(LEARNER, options="-csearch_path=sluice")) as writer:
        writer.execute("SELECT lock_run(%s, NULL, '60s')", (place.run,))
        actor.raise_anchors({"a": [1.0]})
        assert actor.anchors(["a"]) == {"a": (1.0,)}
