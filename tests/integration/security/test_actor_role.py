"""What an actor's role in PostgreSQL may not do, by our own calls and by any SQL; and what it can still do."""

from collections.abc import Callable

import psycopg
import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.store.open import PostgresStore
from bridge.store.store_types import FencedError
from tests.bridge.factories import make_group, make_ticket
from tests.integration.security.store_site import ACTOR, CARD, LEARNER, OTHER, RUN, Site

pytestmark = pytest.mark.integration


def refused(site: Site, statements: dict[str, str], *, role: str = ACTOR) -> None:
    """Each statement fails for want of rights, or touches nothing; what is stored stays as it was."""
    before = site.digest()
    for statement, said in statements.items():
        with site.connect(role) as db:
            try:
                cursor = db.execute(statement.encode())
            except psycopg.Error as e:
                assert said in str(e), f"{statement}: {e}"
            else:
                assert said == "nothing" and (cursor.rowcount == 0 or cursor.fetchall() == [(0,)]), statement
        assert site.digest() == before, statement


DENIED, RULE, POLICY, OWNER = (
    "permission denied",
    "only the run's learner may",
    "row-level security",
    "must be owner",
)


def test_actor_role_reads_another_run_refused(site):
    """An actor's role reads another run's tickets, groups, weights' announcements or files | it sees no row of it"""
    refused(
        site,
        {
            f"SELECT count(*) FROM {table} WHERE run = '{OTHER}'": "nothing"
            for table in ("tickets", "groups", "heartbeats", "serving", "fences", "announcements", "cards", "blobs")
        }
        | {f"SELECT count(run) FROM runs WHERE run = '{OTHER}'": "nothing"}
        | {"SELECT payload FROM payloads": DENIED, "SELECT * FROM restores": DENIED, "SELECT holder FROM runs": DENIED}
        | {f"INSERT INTO payloads VALUES ('{OTHER}', 'c', 'x')": POLICY}
        | {f"UPDATE tickets SET state = 'claimed' WHERE run = '{OTHER}'": "nothing"}
        | {f"SELECT lock_run('{OTHER}', NULL, '0')": ""},
    )
    with pytest.raises(ValueError, match="may not serve it"):
        PostgresStore(site.server.url(ACTOR, site.database), run=OTHER, retry_s=5.0)


LEARNERS_CALLS: dict[str, Callable[[PostgresStore], object]] = {
    "acquire_leadership": lambda s: s.acquire_leadership("elsewhere", lease_s=60),
    "put_tickets": lambda s: s.put_tickets([make_ticket("new")]),
    "acknowledge": lambda s: s.acknowledge(["t5"]),
    "reissue": lambda s: s.reissue(["t5"]),
    "withdraw": lambda s: s.withdraw(["t1"]),
    "roll_back": lambda s: s.roll_back(["t1"], next_order=0, step=0),
    "fence": lambda s: s.fence("honest", "why not"),
    "unfence": lambda s: s.unfence("broken"),
    "record_restore": lambda s: s.record_restore(0, 0),
    "restores": lambda s: s.restores(),
    "read_groups": lambda s: s.read_groups(after_seq=0, limit=10),
    "put_run_card": lambda s: s.put_run_card(CARD, {}),
    "heartbeat as the learner": lambda s: s.heartbeat(Heartbeat(process="learner", role="learner", pid=2, time_s=0.0)),
}


@pytest.mark.parametrize("call", LEARNERS_CALLS)
def test_actor_role_makes_a_call_of_the_learner_refused(site, call):
    """An actor's role makes a call that only the learner may (lead, issue, acknowledge, fence...) | PermissionError"""
    before = site.digest()
    with pytest.raises(
        PermissionError, match=f"{ACTOR}.*(permission denied|row-level security|only the run's learner)"
    ):
        LEARNERS_CALLS[call](site.actor)
    assert site.digest() == before


def test_actor_role_writes_what_is_the_learners_refused(site):
    """Its SQL issues, acknowledges, withdraws, fences, announces, deletes groups or leads | permission denied"""
    refused(
        site,
        {
            f"INSERT INTO tickets (run, id) VALUES ('{RUN}', 'mine')": DENIED,
            "UPDATE tickets SET state = 'acknowledged' WHERE id = 't5'": RULE,
            "UPDATE tickets SET state = 'open' WHERE id = 't5'": RULE,
            "UPDATE tickets SET state = 'done' WHERE id = 't1'": RULE,
            "UPDATE tickets SET payload = ''": DENIED,
            "UPDATE tickets SET fit = ''": DENIED,
            "UPDATE tickets SET only_for = 'me'": DENIED,
            "UPDATE tickets SET run = 'x'": DENIED,
            "UPDATE tickets SET attempts = 99 WHERE id = 't1'": RULE,
            "DELETE FROM tickets": DENIED,
            "UPDATE groups SET actor = 'me'": DENIED,
            "DELETE FROM groups": DENIED,
            "UPDATE payloads SET payload = ''": DENIED,
            "DELETE FROM payloads": "nothing",
            "INSERT INTO fences VALUES ('run', 'honest', 'why not')": DENIED,
            "DELETE FROM fences": DENIED,
            "INSERT INTO announcements VALUES ('run', 9, 9, '', '')": DENIED,
            "UPDATE serving SET sizes = '1:1000000'": DENIED,
            "INSERT INTO serving VALUES ('run', 0, '')": DENIED,
            "DELETE FROM serving": DENIED,
            "UPDATE cards SET payload = ''": DENIED,
            "UPDATE blobs SET content = ''": DENIED,
            "INSERT INTO restores VALUES ('run', 0, 0)": DENIED,
            "UPDATE runs SET incarnation = 99": DENIED,
            "UPDATE runs SET holder = 'me'": DENIED,
            "UPDATE runs SET finished_step = 1": DENIED,
            "UPDATE runs SET owner = current_user": DENIED,
            "UPDATE runs SET actor_role = 'public'": DENIED,
            "UPDATE runs SET last_seq = 1000000": RULE,
            "UPDATE runs SET reissued = 1000000": RULE,
            f"INSERT INTO runs (run, name, actor_role) VALUES ('mine', '', '{ACTOR}')": DENIED,
            "DELETE FROM runs": DENIED,
            "DELETE FROM heartbeats": DENIED,
            "UPDATE heartbeats SET payload = '' WHERE process = 'learner'": "nothing",
            "TRUNCATE groups": DENIED,
            "UPDATE format SET number = 9": DENIED,
        },
    )


def test_actor_role_becomes_another_or_changes_the_rules_refused(site):
    """It takes another role, alters functions, triggers or policies, or turns them off | permission denied"""
    refused(
        site,
        {
            "SET ROLE sluice_learner": DENIED,
            f"SET ROLE {LEARNER}": DENIED,
            "SET SESSION AUTHORIZATION postgres": DENIED,
            f"GRANT sluice_learner TO {ACTOR}": DENIED,
            f"ALTER ROLE {ACTOR} SUPERUSER": DENIED,
            f"ALTER ROLE {LEARNER} PASSWORD 'x'": DENIED,
            "CREATE OR REPLACE FUNCTION sluice.owns(this_run text) RETURNS boolean LANGUAGE sql RETURN true": DENIED,
            "CREATE OR REPLACE FUNCTION sluice.now_s() RETURNS float8 LANGUAGE sql STABLE RETURN 0": DENIED,
            "DROP FUNCTION sluice.check_ticket() CASCADE": OWNER,
            "ALTER TABLE sluice.tickets DISABLE ROW LEVEL SECURITY": OWNER,
            "ALTER TABLE sluice.tickets DISABLE TRIGGER ALL": OWNER,
            "DROP POLICY learner ON sluice.tickets": OWNER,
            "CREATE POLICY mine ON sluice.tickets USING (true)": OWNER,
            "SET session_replication_role = replica": DENIED,
            f"SET row_security = off; SELECT count(*) FROM sluice.tickets WHERE run = '{OTHER}'": POLICY,
            "CREATE TABLE sluice.mine (x int)": DENIED,
            "CREATE TABLE public.mine (x int)": DENIED,
            "CREATE TRIGGER mine BEFORE UPDATE ON tickets FOR EACH ROW EXECUTE FUNCTION sluice.check_run()": DENIED,
        },
    )


def test_actor_role_reaches_out_of_the_database_refused(site):
    """It reads the server's files, starts programs, ends or watches the learner's session | permission denied"""
    learners = f"FROM pg_stat_activity WHERE usename = '{LEARNER}'"
    refused(
        site,
        {
            "COPY (SELECT 1) TO PROGRAM 'id'": DENIED,
            "COPY sluice.format FROM '/etc/hostname'": DENIED,
            "SELECT pg_read_file('/etc/passwd')": DENIED,
            "SELECT pg_ls_dir('.')": DENIED,
            "SELECT rolpassword FROM pg_authid": DENIED,
            f"SELECT pg_terminate_backend(pid) {learners}": DENIED,
            f"SELECT pg_cancel_backend(pid) {learners}": DENIED,
            f"SELECT count(*) {learners} AND query <> '<insufficient privilege>'": "nothing",
            "ALTER SYSTEM SET fsync = off": DENIED,
            "CREATE LANGUAGE plpython3u": "",
        },
    )


def test_actor_role_claims_for_ever_for_nobody_or_over_anothers_lease_refused(site):
    """It leases a ticket for ever, to nobody, or takes one whose lease runs | refused: a day at most, and by a name"""
    assert [t.id for t in site.actor.claim("honest", limit=1, lease_s=60)] == ["t0"]
    claim = "UPDATE tickets SET state = 'claimed', actor = 'me', lease_expires_s = {} WHERE id = 't1'"
    refused(
        site,
        {claim.format(lease): RULE for lease in ("'infinity'", "'NaN'", "NULL", "1e300", "now_s() + 90000")}
        | {"UPDATE tickets SET state = 'claimed', actor = NULL, lease_expires_s = 1 WHERE id = 't1'": RULE}
        | {"UPDATE tickets SET actor = 'me' WHERE id = 't0'": RULE},
    )


def test_actor_role_serves_as_a_fenced_actor_refused(site):
    """A fenced actor's claims and groups, by our calls or by SQL | FencedError; refused"""
    before = site.digest()
    with pytest.raises(FencedError, match="actor broken is fenced: it was"):
        site.actor.claim("broken", limit=1, lease_s=60)
    with pytest.raises(FencedError, match="broken is fenced"):
        site.actor.put_group(make_group(make_ticket("t1", order=1), actor="broken"))
    assert site.digest() == before
    refused(
        site, {"UPDATE tickets SET state = 'claimed', actor = 'broken', lease_expires_s = 1 WHERE id = 't1'": "fenced"}
    )


HUGE = "repeat('x', 70 * 1024 * 1024)"


def test_actor_role_stores_what_would_fill_the_learners_memory_refused(site):
    """It stores a payload over 64 MiB, a reason or name of megabytes, thousands of processes | a constraint refuses"""
    site.actor.claim("honest", limit=1, lease_s=60)
    refused(
        site,
        {
            f"INSERT INTO payloads VALUES ('{RUN}', 'c', convert_to({HUGE}, 'UTF8'))": "check constraint",
            f"INSERT INTO payloads VALUES ('{RUN}', repeat('x', 65), 'x')": "check constraint",
            f"UPDATE tickets SET state = 'failed', failure = {HUGE} WHERE id = 't0'": "check constraint",
            f"UPDATE tickets SET claim = {HUGE} WHERE id = 't0'": "check constraint",
            f"UPDATE tickets SET state = 'claimed', actor = {HUGE}, lease_expires_s = 1": "check constraint",
            f"INSERT INTO heartbeats VALUES ('{RUN}', 'x', convert_to({HUGE}, 'UTF8'), now_s())": "check constraint",
            f"INSERT INTO heartbeats VALUES ('{RUN}', repeat('x', 2000), 'x', now_s())": "",
            f"INSERT INTO heartbeats VALUES ('{RUN}', 'x', 'x', now_s() + 1e9)": RULE,
        },
    )
    with site.connect("postgres") as db:
        db.execute(
            f"INSERT INTO heartbeats SELECT '{RUN}', 'p' || i, 'x', now_s() FROM generate_series(1, 4097) i".encode()
        )
    refused(site, {f"INSERT INTO heartbeats VALUES ('{RUN}', 'one more', 'x', now_s())": "4096 processes per hour"})
    site.actor.heartbeat(Heartbeat(process="p1", role="actor", pid=1, time_s=0.0))  # who is there beats on


def test_actor_role_makes_an_anchor_smaller_refused(site):
    """It makes an anchor smaller, so that correct answers end as too slow, or forgets one | refused: they only go up"""
    site.actor.raise_anchors({"task": [1.5, 20.0]})
    refused(
        site,
        {
            "UPDATE anchors SET ms = '1500,19999'": RULE,
            "UPDATE anchors SET ms = '1500'": RULE,
            f"INSERT INTO anchors VALUES ('{RUN}', 'task', '0') ON CONFLICT (run, key) DO UPDATE SET ms = '0'": RULE,
            "DELETE FROM anchors": DENIED,
            "UPDATE anchors SET key = 'another'": DENIED,
            f"INSERT INTO anchors VALUES ('{OTHER}', 'task', '1')": POLICY,
            f"INSERT INTO anchors VALUES ('{RUN}', 'k', {HUGE})": "",
        },
    )
    site.actor.raise_anchors({"task": [0.1, 21.0]})
    assert site.actor.anchors(["task"]) == {"task": (1.5, 21.0)}


def test_actor_role_hands_in_a_group_outside_the_rules_refused(site):
    """It numbers groups itself, hands one in twice, or one that keeps the honest one out | refused"""
    insert = "INSERT INTO groups VALUES ('{run}', {seq}, '{id}', 'train', 'me', 0, 'mine')"
    with site.connect(ACTOR) as db:
        db.execute(f"INSERT INTO payloads VALUES ('{RUN}', 'mine', 'x')".encode())
    (seq,) = site.connect(ACTOR).execute("SELECT last_seq FROM runs").fetchone() or (0,)
    refused(
        site,
        {
            insert.format(run=RUN, seq=10**6, id="t1"): RULE,
            insert.format(run=RUN, seq=seq, id="t5"): RULE,
            insert.format(run=OTHER, seq=seq, id="t1"): RULE,
            f"UPDATE runs SET last_seq = last_seq + 1; {insert.format(run=RUN, seq=seq + 1, id='t1')}": RULE,
        },
    )
    assert site.actor.put_group(make_group(make_ticket("t1", order=1), actor="honest"))
